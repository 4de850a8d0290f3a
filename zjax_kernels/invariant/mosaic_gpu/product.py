"""Product of rows and a matrix: each sum is one chain of tensor core instructions.

A number of the result is the sum of a row and a column over K, 16 elements an
instruction, from the first on, in one accumulator of float32. The tiling decides which
warpgroup computes the sum, and not how.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from zjax_kernels.device import NUM_SMS
from zjax_kernels.grouped.mosaic_gpu import product
from zjax_kernels.grouped.mosaic_gpu.pipeline import CHUNK, TILE_ROWS
from zjax_kernels.grouped.tuning import Tuning

_STAGES = {64: 7, 128: 5, 256: 4}
"""Stages that fill the shared memory of an SM, by columns of a tile."""
_SETUP_COLUMNS = 64
"""Columns in whose time a tile loads its rows."""


def matmul(
    x: Array,
    weights: Array,
    *,
    dtype: Any,
    transpose: bool = False,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Array:
    """Multiplies rows of 16 bits by a matrix, in float32, rounded to `dtype`.

    `weights` are [K, N], K and N multiples of 64, or with `transpose` [N, K] and any N.
    """
    rows, num_outputs = len(x), weights.shape[0 if transpose else 1]
    # Stores of whole tiles, as rows of an odd length would begin at no 16 bytes.
    columns = -(-num_outputs // CHUNK) * CHUNK
    width = CHUNK * 2 // jnp.dtype(dtype).itemsize

    def store(half: product.HalfTile) -> None:
        (total,), (out,) = half.sums, half.refs.outputs
        for start in range(0, total.shape[1], width):
            half.store(out, start, total[:, start : start + width].astype(dtype))

    out = jax.ShapeDtypeStruct((rows, columns), dtype)
    (found,) = product.multiply_tiles(
        *(x, weights[None], _tiles(rows)),
        product.Epilogue(store, [out], num_stores=1),
        columns=columns,
        transpose=transpose,
        tuning=tuning or choose_tuning(rows, columns),
        interpret=interpret,
    )
    return found[:, :num_outputs]


def choose_tuning(rows: int, columns: int) -> Tuning:
    """Returns the tuning under which the last SM ends first; no bit depends on it."""
    above = -(-rows // TILE_ROWS)

    def cost(width: int) -> int:
        rounds = -(-above * (columns // width) // NUM_SMS)
        return rounds * (width + _SETUP_COLUMNS)

    widths = [width for width in sorted(_STAGES) if columns % width == 0]
    best = min(reversed(widths), key=cost)
    return Tuning(tile_columns=best, stages=_STAGES[best])


def _tiles(rows: int) -> tuple[np.ndarray, ...]:
    """Returns group, first row and rows of each tile, and the number of tiles."""
    count = -(-rows // TILE_ROWS)
    # The last tile begins earlier, until the tile is full, and stores some rows again.
    starts = np.minimum(np.arange(count) * TILE_ROWS, max(rows - TILE_ROWS, 0))
    heights = np.full(count, min(rows, TILE_ROWS))
    tiles = np.zeros(count), starts, heights, np.array([count])
    return tuple(x.astype(np.int32) for x in tiles)
