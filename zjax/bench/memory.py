"""What a run holds on a device: as arrays, by the allocator, by the compiler."""

from collections.abc import Sequence

import jax

from zjax.train.state import TrainState
from zjax.typing import Device


def state_bytes(state: TrainState, device: Device) -> int:
    """Bytes of a state in the memory of one device, as it lies there.

    Args:
        state: Its arrays, on their shards.
        device: One of this process.

    Returns:
        The sum over the shards; what lies in the host's memory does not count.
    """
    kind = device.default_memory().kind
    return sum(
        shard.data.nbytes
        for array in jax.tree.leaves(state)
        if array.sharding.memory_kind == kind
        if isinstance(array, jax.Array)  # the others rest on disks
        for shard in array.addressable_shards
        if shard.device == device
    )


def peak_bytes(devices: Sequence[Device]) -> int | None:
    """Most memory that any of some devices has held in arrays since the start.

    Args:
        devices: Of this process.

    Returns:
        Bytes; None where the devices do not say, as CPUs.
    """
    stats = [device.memory_stats() or {} for device in devices]
    peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
    return max(peaks, default=None)


def predicted_peak_bytes(compiled: jax.stages.Compiled | None) -> int | None:
    """Memory that a program needs on a device while it runs.

    Args:
        compiled: Of `Step.compile`; None gives None.

    Returns:
        Bytes of arguments, results that do not reuse them, and temporaries; None where
        the compiler does not say.
    """
    analysis = None if compiled is None else compiled.memory_analysis()
    if analysis is None:
        return None
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )
