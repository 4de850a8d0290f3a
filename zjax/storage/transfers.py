"""Budgets of bytes in transfer between memories, and a bar for long transfers."""

import contextlib
import contextvars
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from zjax.sharding.mesh import device_capacity_bytes

IN_FLIGHT_BYTES, IN_FLIGHT_SHARE = 5 * 10**9, 0.15
"""Most bytes on a device, and share of its memory, of arrays in transfer. A few groups
fit, so that the next groups arrive while the device computes a block."""

READ_AHEAD_BYTES = 4 * 10**9
"""Bytes on the host for one device that are read from disks before the device has
room."""

FROM_DISKS_BYTES = READ_AHEAD_BYTES + IN_FLIGHT_BYTES
"""Bytes on the host for one device that are read ahead or being copied to the
device."""


class DiskStaging(NamedTuple):
    """Host memory for one device, of arrays in transfer between the device and disks.

    Args:
        from_disks: Bytes read ahead or being copied to the device. The bytes are not
            pinned, though JAX may copy through pinned memory, as it does from the host.
        to_disks: Bytes being written, pinned.
    """

    from_disks: int
    to_disks: int


def in_flight_bytes(capacity_bytes: int | float) -> int:
    """Returns the bytes for arrays in transfer on a device of `capacity_bytes`.

    The capacity is infinite if the device does not report it.

    Example:
        >>> [in_flight_bytes(size * 10**9) / 1e9 for size in (16, 141)]
        [2.4, 5.0]
    """
    return int(min(IN_FLIGHT_BYTES, IN_FLIGHT_SHARE * capacity_bytes))


def transfer_budget(mesh: Any) -> int:
    """Returns the `in_flight_bytes` of the smallest device of a mesh."""
    return in_flight_bytes(device_capacity_bytes(mesh))


def staging_bytes(on_disks: int) -> DiskStaging:
    """Returns the host memory for transfers between disks and one device.

    `on_disks` are the bytes of the device's state that disks store.
    """
    from_disks = min(FROM_DISKS_BYTES, on_disks)
    return DiskStaging(from_disks, min(IN_FLIGHT_BYTES, on_disks))


_LONG_BYTES = 10**9
_LINE_SECONDS = 30
"""Seconds between lines of progress where there is no terminal."""
_advance: contextvars.ContextVar[Callable[[int], None] | None]
_advance = contextvars.ContextVar("advance", default=None)


@contextlib.contextmanager
def progress_bar(what: str, num_bytes: int) -> Iterator[None]:
    """Shows a bar of `report_moved` calls within the context, from a gigabyte on."""
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
    """Returns a function that adds bytes, and prints a line now and then."""
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
