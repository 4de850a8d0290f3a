"""Tuning of the grouped kernels: the default, or measured by `tune_grouped_matmul`."""

import dataclasses
from typing import Literal

from zjax_kernels.tunings import TuningFile

Kernel = Literal["matmul", "transposed", "outer", "activation", "activation_backward"]


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Sizes that set how fast a kernel runs; results do not depend on the tuning.

    Args:
        tile_columns: Columns of an output tile: 64, 128 or 256; the next smaller number
            where the columns of the output are no multiple.
        stages: Steps of the contraction in shared memory at a time, 2 or more.
        band: Tiles of rows that are computed before the next tile of columns, 1 or
            more; `grouped_outer` ignores the band.
    """

    tile_columns: int = 256
    stages: int = 4
    band: int = 8

    def width(self, columns: int, num_parts: int = 1) -> int:
        """Returns the columns of a tile of an output with `columns`."""
        # Products of a tile share the registers.
        widest = max(64, self.tile_columns // num_parts)
        sizes = (n for n in (256, 128, 64) if n <= widest)
        return next(n for n in sizes if columns % n == 0)


def choose_tuning(kernel: Kernel, num_groups: int, k: int, n: int) -> Tuning:
    """Returns the tuning measured for a kernel and matrices, or the default."""
    return MEASURED.get(kernel, num_groups, k, n) or Tuning()


_LEAST = {"tile_columns": 64, "stages": 2, "band": 1}
MEASURED = TuningFile("grouped_matmul.json", Tuning, _LEAST)
"""Tunings by kernel, number, rows and columns of the matrices."""
