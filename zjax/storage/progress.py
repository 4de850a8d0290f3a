"""A bar for moves that take long, such as those of a first state.

Where there is no terminal, as in the log of a job, it is a line now and then.
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
_told: contextvars.ContextVar[Callable[[int], None] | None] = contextvars.ContextVar(
    "told", default=None
)


@contextlib.contextmanager
def shown(what: str, num_bytes: int) -> Iterator[None]:
    """Shows how much of some bytes has been moved.

    Args:
        what: Is being done.
        num_bytes: In all; below a gigabyte nothing is shown.
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
        token = _told.set(lines if bar.disable else lambda n: bar.advance(task, n))
        try:
            yield
        finally:
            _told.reset(token)


def _lines(what: str, num_bytes: int, console: Console) -> Callable[[int], None]:
    moved, said = 0, time.monotonic()

    def add(more: int) -> None:
        nonlocal moved, said
        moved += more
        if time.monotonic() - said >= _LINE_SECONDS:
            said = time.monotonic()
            console.print(f"{what}: {moved / 1e9:.1f} of {num_bytes / 1e9:.1f} GB")

    return add


def tell(num_bytes: int) -> None:
    """Says that something was moved.

    Args:
        num_bytes: How much of it.
    """
    told = _told.get()
    if told is not None:
        told(num_bytes)
