"""How much may be on its way between the memory of devices, the host's, and disks."""

from typing import Any, NamedTuple

from zjax.sharding.mesh import device_capacity_bytes

IN_FLIGHT_BYTES, IN_FLIGHT_SHARE = 5 * 10**9, 0.15
"""On a device, and of its memory, of arrays on their way; the next wait until some have
left. While a few groups come up and go down, others wait behind the block that the
device computes."""

READ_AHEAD_BYTES = 4 * 10**9
"""On the host for one device, of what is read from disks before there is room."""

FROM_DISKS_BYTES = READ_AHEAD_BYTES + IN_FLIGHT_BYTES
"""The same, with what goes up meanwhile."""


class Passing(NamedTuple):
    """Bytes on a host, for one device, of what is on its way between it and disks.

    Args:
        from_disks: Read ahead, or going up. It is not pinned, though JAX may take what
            goes up through pinned memory, as it does what goes up from the host.
        to_disks: Pinned.
    """

    from_disks: int
    to_disks: int


def in_flight_bytes(capacity_bytes: int | float) -> int:
    """Room on a device for state that passes through it.

    Args:
        capacity_bytes: Memory of the device; infinite where it does not say.

    Returns:
        Bytes.

    Example:
        >>> [in_flight_bytes(size * 10**9) / 1e9 for size in (16, 141)]
        [2.4, 5.0]
    """
    return int(min(IN_FLIGHT_BYTES, IN_FLIGHT_SHARE * capacity_bytes))


def room_to_pass(mesh: Any) -> int:
    """The same for the smallest device of a mesh.

    Args:
        mesh: The devices.

    Returns:
        Bytes.
    """
    return in_flight_bytes(device_capacity_bytes(mesh))


def passing_bytes(on_disks: int) -> Passing:
    """Room on a host for what is on its way between one device and disks.

    Args:
        on_disks: Bytes of the device's state that rest there.

    Returns:
        At most those, either way.

    Example:
        >>> passing_bytes(6 * 10**9)
        Passing(from_disks=6000000000, to_disks=5000000000)
    """
    from_disks = min(FROM_DISKS_BYTES, on_disks)
    return Passing(from_disks, min(IN_FLIGHT_BYTES, on_disks))
