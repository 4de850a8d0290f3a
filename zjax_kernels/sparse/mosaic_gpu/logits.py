"""What scores become before and after the exponential: capped, masked, in base 2."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zjax_kernels.sparse.cells import HALF
from zjax_kernels.sparse.mosaic_gpu.arithmetic import ROWS, Arithmetic, index
from zjax_kernels.sparse.reference import Options
from zjax_kernels.sparse.schedule import Schedule

LOG2E = math.log2(math.e)


def along_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeats one number per row along the columns.

    Args:
        x: [m].
        shape: (m, n).

    Returns:
        [m, n].
    """
    return lax.broadcast_in_dim(x, shape, [0])


def along_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeats one number per column along the rows.

    Args:
        x: [n].
        shape: (m, n).

    Returns:
        [m, n].
    """
    return lax.broadcast_in_dim(x, shape, [1])


def mask_cells(
    arithmetic: Arithmetic,
    x: jax.Array,
    schedule: Schedule,
    words: tuple[Any, Any, Any] | None,
    dead: float,
) -> jax.Array:
    """Puts `dead` where a half of a tile does not see a token of a chunk.

    Logic is in integers: logic of Booleans does not lower by warpgroups.

    Args:
        arithmetic: Operations on registers.
        x: float32[HALF, chunk].
        schedule: The plan's sizes.
        words: From `read_words`; none if all live.
        dead: What to put.

    Returns:
        float32[HALF, chunk].
    """
    if words is None:
        return x
    live, diagonal, element = words
    across = schedule.chunk // schedule.cell
    row, column = (arithmetic.iota(x.shape, axis) for axis in (0, 1))
    nth = _over(column, schedule.cell)
    if schedule.cell < HALF:
        nth += _over(row, schedule.cell) * index(across)

    def bit(words, nth):
        return lax.bitwise_and(lax.shift_right_logical(words, nth), index(1))

    def of_cell(word):
        return bit(arithmetic.spread(word, x.shape), nth)

    if schedule.causal:
        after = _modulo(column, schedule.cell) - _modulo(row, schedule.cell)
        after = jnp.maximum(-after if schedule.transposed else after, 0)
        x = jnp.where(of_cell(diagonal) * after > 0, dead, x)
    if element is not None:
        word, *others = (along_rows(word, x.shape) for word in element)
        for number, other in enumerate(others, start=1):
            word = jnp.where(column < number * 32, word, other)
        x = jnp.where(bit(word, _modulo(column, 32)) != 0, x, dead)
    return jnp.where(of_cell(live) != 0, x, dead)


def _over(x, power_of_2):
    return lax.shift_right_logical(x, index(power_of_2.bit_length() - 1))


def _modulo(x, power_of_2):
    return lax.bitwise_and(x, index(power_of_2 - 1))


def read_words(
    arithmetic: Arithmetic, schedule: Schedule, chunk: jax.Array, half: jax.Array
) -> tuple[Any, Any, Any]:
    """Reads what lives in a chunk.

    Args:
        arithmetic: Operations on registers.
        schedule: References to the GPU's memory.
        chunk: Which chunk.
        half: Which half of the tile.

    Returns:
        Bits of live cells, of those on the diagonal, and those of tokens by row for
        every 32 columns, or none.
    """
    element = None
    masks: Any = schedule.masks
    if schedule.elements is not None:
        number = schedule.elements[chunk, half]
        element = [
            arithmetic.load(masks.at[number, word], ROWS, optimized=False)
            for word in range(masks.shape[1])
        ]
    return schedule.live[chunk, half], schedule.diagonal[chunk, half], element


def bend(scores: jax.Array, options: Options) -> tuple[jax.Array, jax.Array | None]:
    """Scales and caps scores.

    Args:
        scores: Products of queries and keys.
        options: What scores mean.

    Returns:
        Scores in base 2, and what their gradient is multiplied with, if capped.
    """
    if not options.soft_cap:
        return scores * (options.scale * LOG2E), None
    bent = jnp.tanh(scores * (options.scale / options.soft_cap))
    return bent * (options.soft_cap * LOG2E), 1.0 - bent * bent


def base_2(lse: jax.Array) -> jax.Array:
    """Log-sum-exps as exponents of 2; those of nothing make all weights 0.

    Args:
        lse: Natural logarithms, -inf for a query that sees no key.

    Returns:
        The same in base 2, and inf.
    """
    return jnp.where(jnp.isneginf(lse), jnp.inf, lse * LOG2E)


def mask_segments(
    x: jax.Array, of_rows: jax.Array, of_columns: jax.Array, dead: float
) -> jax.Array:
    """Puts `dead` where row and column are of different documents.

    Args:
        x: float32[m, n].
        of_rows: int32[m].
        of_columns: int32[n].
        dead: What to put.

    Returns:
        float32[m, n].
    """
    same = along_rows(of_rows, x.shape) - along_columns(of_columns, x.shape)
    return jnp.where(same == 0, x, dead)
