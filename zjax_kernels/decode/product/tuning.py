"""Tuning of the kernel of products of few rows: a rule measured on the H200."""

import dataclasses

from zjax_kernels.device import NUM_SMS

DEPTH = 64
"""Contracted channels of a step: 128 bytes, the width of the swizzle."""
WIDTHS = (128, 64)
"""Output channels of a program, preferred first."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Sizes that set how fast the kernel runs.

    Args:
        width: Output channels of a program, a multiple of 64.
        splits: Programs that share the contracted channels of a tile, 1 or more.
        stages: Steps of weights in shared memory at a time, 2 or more.
    """

    width: int
    splits: int
    stages: int


_MEMORY = 224 * 1024
"""Bytes of shared memory of an SM that programs may fill."""


def choose(rows: int, depth: int, columns: int) -> Tuning:
    """Returns the tuning for `rows` of `depth` inputs and `columns` outputs."""
    widths = [x for x in WIDTHS if columns % x == 0 and columns // x >= NUM_SMS]
    width = widths[0] if widths else WIDTHS[-1]
    tiles = columns // width
    splits = max(1, min(depth // DEPTH, NUM_SMS // tiles))
    programs_per_sm = 1 if tiles * splits <= NUM_SMS else 2
    return Tuning(width, splits, num_stages(rows, width, programs_per_sm))


def num_stages(rows: int, width: int, programs_per_sm: int) -> int:
    """Returns the stages of programs that share the memory of an SM."""
    rows = -(-rows // 8) * 8
    left = _MEMORY // programs_per_sm - 4 * rows * width
    return left // (2 * DEPTH * (rows + width))
