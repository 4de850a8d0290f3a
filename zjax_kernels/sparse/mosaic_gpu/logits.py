"""Scores before and after the exponential: scaled, capped, masked, in base 2."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zjax_kernels.sparse.cells import HALF
from zjax_kernels.sparse.mosaic_gpu.arithmetic import ROWS, Arithmetic, index
from zjax_kernels.sparse.reference import Options
from zjax_kernels.sparse.schedule import Schedule

LOG2E = math.log2(math.e)


def per_row(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts one number per row, [m], to [m, n]."""
    return lax.broadcast_in_dim(x, shape, [0])


def per_column(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts one number per column, [n], to [m, n]."""
    return lax.broadcast_in_dim(x, shape, [1])


class Words(NamedTuple):
    """Bits of half a chunk, as in a `Schedule`."""

    live: Any
    diagonal: Any
    element: list[Any] | None
    """None without a token mask."""
    edges: tuple[Any, ...]
    """Empty without a window."""
    edge_offset: Any


def mask_cells(
    arithmetic: Arithmetic,
    x: jax.Array,
    schedule: Schedule,
    words: Words | None,
    fill: float,
) -> jax.Array:
    """Puts `fill` where a row of x, float32[HALF, chunk], does not see a column.

    `words` are bits of `read_words`, or None if all cells live. The logic is integer,
    since Boolean logic does not lower by warpgroup.
    """
    if words is None:
        return x
    cells_per_row = schedule.chunk // schedule.cell
    row, column = (arithmetic.iota(x.shape, axis) for axis in (0, 1))
    cell = _divide(column, schedule.cell)
    if schedule.cell < HALF:
        cell += _divide(row, schedule.cell) * index(cells_per_row)

    def bit(words, position):
        return lax.bitwise_and(lax.shift_right_logical(words, position), index(1))

    def cell_bit(word):
        return bit(arithmetic.broadcast(word, x.shape), cell)

    after = _modulo(column, schedule.cell) - _modulo(row, schedule.cell)
    after = -after if schedule.transposed else after
    if schedule.causal:
        x = jnp.where(cell_bit(words.diagonal) * jnp.maximum(after, 0) > 0, fill, x)
    if words.edges:
        first, second = map(cell_bit, words.edges)
        # Tokens by which a key is out of reach, in cells that the window's end crosses.
        beyond = second * index(schedule.cell) - after
        beyond -= arithmetic.broadcast(words.edge_offset - index(1), x.shape)
        x = jnp.where((first + second) * jnp.maximum(beyond, 0) > 0, fill, x)
    if words.element is not None:
        word, *others = (per_row(word, x.shape) for word in words.element)
        for number, other in enumerate(others, start=1):
            word = jnp.where(column < number * 32, word, other)
        x = jnp.where(bit(word, _modulo(column, 32)) != 0, x, fill)
    return jnp.where(cell_bit(words.live) != 0, x, fill)


def _divide(x, power_of_2):
    return lax.shift_right_logical(x, index(power_of_2.bit_length() - 1))


def _modulo(x, power_of_2):
    return lax.bitwise_and(x, index(power_of_2 - 1))


def read_words(
    arithmetic: Arithmetic, schedule: Schedule, chunk: jax.Array, half: jax.Array
) -> Words:
    """Reads the bits of half a chunk."""
    element, edges, offset = None, (), None
    masks: Any = schedule.masks
    if schedule.elements is not None:
        number = schedule.elements[chunk, half]
        element = [
            arithmetic.load(masks.at[number, word], ROWS, optimized=False)
            for word in range(masks.shape[1])
        ]
    if schedule.edges is not None and schedule.edge_offset is not None:
        edges = tuple(schedule.edges[chunk, half, number] for number in range(2))
        offset = schedule.edge_offset[0]
    live, diagonal = schedule.live[chunk, half], schedule.diagonal[chunk, half]
    return Words(live, diagonal, element, edges, offset)


def scale_and_cap(
    scores: jax.Array, options: Options
) -> tuple[jax.Array, jax.Array | None]:
    """Scores in base 2, and the derivative of the cap, or None without one."""
    if not options.soft_cap:
        return scores * (options.scale * LOG2E), None
    capped = jnp.tanh(scores * (options.scale / options.soft_cap))
    return capped * (options.soft_cap * LOG2E), 1.0 - capped * capped


def base_2(lse: jax.Array) -> jax.Array:
    """Log-sum-exps in base 2; inf for queries without keys, so that weights are 0."""
    return jnp.where(jnp.isneginf(lse), jnp.inf, lse * LOG2E)


def mask_segments(
    x: jax.Array, row_segments: jax.Array, column_segments: jax.Array, fill: float
) -> jax.Array:
    """Puts `fill` where row and column are of different documents."""
    difference = per_row(row_segments, x.shape) - per_column(column_segments, x.shape)
    return jnp.where(difference == 0, x, fill)
