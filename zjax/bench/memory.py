"""Device memory of a run: of its arrays, by the allocator, by the compiler."""

from collections.abc import Sequence

import jax

from zjax.sharding.placement import array_bytes
from zjax.train.state import TrainState
from zjax.typing import Device


def state_bytes(state: TrainState, device: Device) -> int:
    """Bytes of a state's shards in the memory of one local device."""
    kind = device.default_memory().kind
    return sum(
        array_bytes(shard.data.shape, shard.data.dtype)
        for array in jax.tree.leaves(state)
        if array.sharding.memory_kind == kind
        if isinstance(array, jax.Array)  # the others rest on disks
        for shard in array.addressable_shards
        if shard.device == device
    )


def peak_bytes(devices: Sequence[Device]) -> int | None:
    """Most memory in arrays on any of some local devices since the start.

    Returns:
        Bytes; None if the devices do not report it, as CPUs.
    """
    stats = [device.memory_stats() or {} for device in devices]
    peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
    return max(peaks, default=None)
