"""Tuning of the sparse kernels: a table for the H200, or measured by `tune`."""

import dataclasses

from zjax_kernels.tunings import TuningFile


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Choices that set how fast a kernel runs; results do not depend on the tuning.

    Args:
        stages: Chunks in shared memory at a time, 1 or more.
        tiles: Tiles in shared memory at a time, 1 or more.
        warpgroup: Whether Mosaic lowers by warpgroup rather than by lane.
    """

    stages: int = 2
    tiles: int = 1
    warpgroup: bool = False


H200 = {
    "forward": {
        64: Tuning(stages=3, tiles=2),
        96: Tuning(stages=2, tiles=2),
        128: Tuning(stages=2, tiles=2),
        256: Tuning(stages=2),
    },
    "queries": {
        64: Tuning(stages=4, tiles=2),
        96: Tuning(stages=2, tiles=2),
        128: Tuning(stages=2, tiles=2),
        256: Tuning(stages=1),
    },
    "keys": {
        64: Tuning(stages=4, tiles=2),
        96: Tuning(stages=2, tiles=2),
        128: Tuning(stages=2, tiles=2),
        256: Tuning(stages=1),
    },
}


def choose_tuning(kernel: str, head_size: int, *, segmented: bool) -> Tuning:
    """Returns the tuning measured on the GPU in use, or the shipped tuning."""
    shipped = H200[kernel][head_size]
    # Segments take shared memory, and are not tuned.
    if not segmented:
        return MEASURED.get(kernel, head_size) or shipped
    # Segments leave no memory for two tiles of 128 channels.
    lacks_memory = kernel == "queries" and head_size == 128
    return dataclasses.replace(shipped, tiles=1) if lacks_memory else shipped


MEASURED = TuningFile("sparse_attention.json", Tuning, {"stages": 1, "tiles": 1})
