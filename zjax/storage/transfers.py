"""Bytes that may be in transfer between devices, the host, and disks."""

from typing import Any, NamedTuple

from zjax.sharding.mesh import device_capacity_bytes

IN_FLIGHT_BYTES, IN_FLIGHT_SHARE = 5 * 10**9, 0.15
"""Most bytes on a device, and share of its memory, of arrays in transfer. A few groups
fit, so that others wait while the device computes a block."""

READ_AHEAD_BYTES = 4 * 10**9
"""Bytes on the host for one device that are read from disks before the device has room
for them."""

FROM_DISKS_BYTES = READ_AHEAD_BYTES + IN_FLIGHT_BYTES
"""The same, with those that are being copied to the device."""


class DiskStaging(NamedTuple):
    """Host memory for one device, of arrays in transfer between it and disks.

    Args:
        from_disks: Bytes read ahead or being copied to the device. They are not pinned,
            though JAX may copy through pinned memory, as it does from the host.
        to_disks: Bytes being written, pinned.
    """

    from_disks: int
    to_disks: int


def in_flight_bytes(capacity_bytes: int | float) -> int:
    """Bytes on a device for arrays in transfer.

    Args:
        capacity_bytes: Memory of the device; infinite where it does not say.

    Example:
        >>> [in_flight_bytes(size * 10**9) / 1e9 for size in (16, 141)]
        [2.4, 5.0]
    """
    return int(min(IN_FLIGHT_BYTES, IN_FLIGHT_SHARE * capacity_bytes))


def transfer_budget(mesh: Any) -> int:
    """The `in_flight_bytes` of the smallest device of a mesh."""
    return in_flight_bytes(device_capacity_bytes(mesh))


def staging_bytes(on_disks: int) -> DiskStaging:
    """Host memory for transfers between one device and disks.

    Args:
        on_disks: Bytes of the device's state that are stored there.

    Example:
        >>> staging_bytes(6 * 10**9)
        DiskStaging(from_disks=6000000000, to_disks=5000000000)
    """
    from_disks = min(FROM_DISKS_BYTES, on_disks)
    return DiskStaging(from_disks, min(IN_FLIGHT_BYTES, on_disks))
