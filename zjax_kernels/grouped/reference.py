"""Grouped products tile by tile, in memory of the order of their operands."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from zjax_kernels.grouped.activations import activate
from zjax_kernels.grouped.tiles import make_tiles

TILE_ROWS = 128


def grouped_matmul(
    x: Array,
    weights: Array,
    sizes: Array,
    bias: Array | None = None,
    *,
    transpose: bool = False,
) -> Array:
    """Multiplies the rows of each group by its matrix, and adds its bias.

    Args:
        x: [M, K].
        weights: [G, K, N], or [G, N, K] if `transpose`.
        sizes: int32[G].
        bias: [G, N].
        transpose: Whether to multiply by transposed matrices.

    Returns:
        [M, N] in the dtype of `x`, summed in float32; 0 in rows without a group.
    """
    rows = _tile_rows(x, sizes)
    offsets = jnp.arange(rows)[:, None]

    def multiply(out: Array, tile: Any) -> tuple[Array, None]:
        part = jax.lax.dynamic_slice_in_dim(padded, tile.start, rows)
        matrix = weights[tile.group].T if transpose else weights[tile.group]
        product = jnp.dot(part, matrix, preferred_element_type=jnp.float32)
        if bias is not None:
            product += bias[tile.group][None]
        product = product.astype(x.dtype)
        before = jax.lax.dynamic_slice_in_dim(out, tile.start, rows)
        product = jnp.where(offsets < tile.rows, product, before)
        return jax.lax.dynamic_update_slice_in_dim(out, product, tile.start, 0), None

    padded = jnp.pad(x, ((0, rows), (0, 0)))
    columns = weights.shape[1 if transpose else 2]
    out = jnp.zeros((len(padded), columns), x.dtype)
    out, _ = jax.lax.scan(multiply, out, make_tiles(sizes, len(x), rows))
    return out[: len(x)]


def grouped_activation(
    x: Array,
    weights: Array,
    sizes: Array,
    bias: Array | None = None,
    *,
    activation: str,
    transpose: bool = False,
    saves: bool = True,
) -> tuple[Array, ...]:
    """Applies an activation to `grouped_matmul`.

    Args:
        x: [M, K].
        weights: [G, K, N], or [G, N, K] if `transpose`; N is F, or 2 F for `swiglu`.
        sizes: int32[G].
        bias: [G, N].
        activation: Activation.
        transpose: Whether to multiply by transposed matrices.
        saves: Whether to return the pre-activations, too.

    Returns:
        The pre-activations [M, N] if `saves`, and the activations [M, F].
    """
    inputs = grouped_matmul(x, weights, sizes, bias, transpose=transpose)
    return *[inputs] * saves, activate(activation, inputs).astype(x.dtype)


def grouped_activation_backward(
    cotangent: Array,
    weights: Array,
    sizes: Array,
    inputs: Array,
    scale: Array,
    *,
    activation: str,
) -> tuple[Array, Array, Array]:
    """Differentiates `scale * grouped_matmul(activate(inputs), weights)`.

    Args:
        cotangent: [M, K].
        weights: [G, F, K].
        sizes: int32[G].
        inputs: [M, F], or [M, 2 F] for `swiglu`.
        scale: float32[M].
        activation: Activation.

    Returns:
        The cotangents of `inputs`, the scaled activations, and the cotangents of
        `scale` in float32.
    """
    product = grouped_matmul(cotangent, weights, sizes, transpose=True)
    run = functools.partial(activate, activation)
    activated, differentiate = jax.vjp(run, inputs)
    scales, product = scale[:, None], product.astype(activated.dtype)
    (gradients,) = differentiate((product * scales).astype(activated.dtype))
    products = (activated * product).sum(1).astype(jnp.float32)
    return gradients, (activated * scales).astype(inputs.dtype), products


def grouped_outer(x: Array, y: Array, sizes: Array) -> Array:
    """Multiplies the transposed rows of each group in `x` by those in `y`.

    Args:
        x: [M, K].
        y: [M, N].
        sizes: int32[G].

    Returns:
        [G, K, N] in the dtype of `x`, summed in float32; 0 for an empty group.
    """
    rows = _tile_rows(x, sizes)
    offsets = jnp.arange(rows)[:, None]

    def add(out: Array, tile: Any) -> tuple[Array, None]:
        parts = [
            jax.lax.dynamic_slice_in_dim(each, tile.start, rows) for each in (xs, ys)
        ]
        # Where rows of other groups hold NaN, a product with 0 would spread it.
        mine, other = (jnp.where(offsets < tile.rows, part, 0) for part in parts)
        product = jnp.dot(mine.T, other, preferred_element_type=jnp.float32)
        return out.at[tile.group].add(product), None

    xs, ys = (jnp.pad(each, ((0, rows), (0, 0))) for each in (x, y))
    out = jnp.zeros((sizes.size, x.shape[1], y.shape[1]), jnp.float32)
    out, _ = jax.lax.scan(add, out, make_tiles(sizes, len(x), rows))
    return out.astype(x.dtype)


def grouped_sum(x: Array, sizes: Array, scale: Array | None = None) -> Array:
    """Sums the scaled rows of each group.

    Args:
        x: [M, N].
        sizes: int32[G].
        scale: [M]; 1 by default.

    Returns:
        [G, N] in the dtype of `x`, summed in float32; 0 for an empty group.
    """
    row = jnp.arange(len(x))
    group = jnp.searchsorted(jnp.cumsum(sizes), row, side="right")
    rows = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    rows = rows if scale is None else rows * scale[:, None]
    sums = jax.ops.segment_sum(rows, group, len(sizes), indices_are_sorted=True)
    return sums.astype(x.dtype)


def copy_rows(x: Array, sources: Array, targets: Array) -> Array:
    """Copies rows.

    Args:
        x: [T, M].
        sources: int32[R], the row of `x` that each row of the result is.
        targets: int32[T, K], the rows of the result that each row of `x` is.

    Returns:
        [R, M].
    """
    del targets
    return jnp.take(x, sources, axis=0, mode="clip")


def _tile_rows(x: Array, sizes: Array) -> int:
    """Few rows where groups are small: what pads the last tile is computed, too."""
    even = -(-len(x) // sizes.size)
    return max(1, min(TILE_ROWS, even))
