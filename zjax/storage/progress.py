"""A bar for moves that take long, such as those of a first state."""

import contextlib
import contextvars
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
_told: contextvars.ContextVar[Callable[[int], None] | None] = contextvars.ContextVar(
    "told", default=None
)


@contextlib.contextmanager
def shown(what: str, num_bytes: int) -> Iterator[None]:
    """Shows how much of some bytes has been moved, on a terminal.

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
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=num_bytes)
        token = _told.set(lambda moved: bar.advance(task, moved))
        try:
            yield
        finally:
            _told.reset(token)


def tell(num_bytes: int) -> None:
    """Says that something was moved.

    Args:
        num_bytes: How much of it.
    """
    told = _told.get()
    if told is not None:
        told(num_bytes)
