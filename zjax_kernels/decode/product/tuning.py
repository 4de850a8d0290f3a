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


MAX_SPLITS = 8
"""Programs of a cluster that any Hopper GPU runs."""
_MEMORY = 224 * 1024
"""Bytes of shared memory of an SM that programs may fill."""


def choose(rows: int, depth: int, columns: int, parts: int = 1) -> Tuning:
    """Returns the tuning for `rows` of `depth` inputs and `columns` outputs.

    Each output is of `parts` columns of the weights.
    """
    wide = [x for x in WIDTHS if columns % x == 0 and columns // x >= NUM_SMS]
    width = wide[0] if wide and parts == 1 else WIDTHS[-1]
    tiles = columns // width
    splits = max(1, min(depth // DEPTH, MAX_SPLITS, NUM_SMS // tiles))
    programs_per_sm = 1 if tiles * splits <= NUM_SMS else 2
    stages = num_stages(rows, width, parts, splits, programs_per_sm)
    return Tuning(width, splits, stages)


def num_stages(
    rows: int, width: int, parts: int, splits: int, programs_per_sm: int
) -> int:
    """Returns the stages of programs that share the memory of an SM."""
    rows = -(-rows // 8) * 8
    # A result and a residual, and sums that others send.
    others = 4 * (splits - 1) * (parts * width + DEPTH) * rows
    left = _MEMORY // programs_per_sm - 4 * rows * width - others
    return left // (2 * DEPTH * (rows + parts * width + 2))
