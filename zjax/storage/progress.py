"""A progress bar for long transfers, such as those of a first state.

Without a terminal, as in the log of a job, it prints a line now and then.
"""

import contextlib
import contextvars
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_LONG_BYTES = 10**9
_LINE_SECONDS = 30
_advance: contextvars.ContextVar[Callable[[int], None] | None]
_advance = contextvars.ContextVar("advance", default=None)


@contextlib.contextmanager
def progress_bar(what: str, num_bytes: int) -> Iterator[None]:
    """Shows what `report_moved` reports, within its context.

    Args:
        what: Title of the bar.
        num_bytes: Total to move; below a gigabyte nothing is shown.
    """
    if num_bytes < _LONG_BYTES:
        yield
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    lines = _lines(what, num_bytes, console)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=num_bytes)
        token = _advance.set(lines if bar.disable else lambda n: bar.advance(task, n))
        try:
            yield
        finally:
            _advance.reset(token)


def _lines(what: str, num_bytes: int, console: Console) -> Callable[[int], None]:
    moved, printed = 0, time.monotonic()

    def add(more: int) -> None:
        nonlocal moved, printed
        moved += more
        if time.monotonic() - printed >= _LINE_SECONDS:
            printed = time.monotonic()
            console.print(f"{what}: {moved / 1e9:.1f} of {num_bytes / 1e9:.1f} GB")

    return add


def report_moved(num_bytes: int) -> None:
    """Advances the progress bar, if one is shown."""
    advance = _advance.get()
    if advance is not None:
        advance(num_bytes)
