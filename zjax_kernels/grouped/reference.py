"""Grouped products in jax.numpy, tile by tile: the specification of the kernels."""

import dataclasses
import functools
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array

from zjax_kernels import abstract

Activation = Literal["swiglu", "clamped_swiglu", "gelu", "relu"]
ACTIVATIONS = get_args(Activation)
SLOPE, LIMIT = 1.702, 7.0
"""Slope of the sigmoid of `clamped_swiglu`, and bound of gates and values."""


def num_parts(activation: str) -> int:
    """Returns the columns that one column of the activation reads: 2 with gates."""
    return 2 if activation.endswith("swiglu") else 1


def activate(activation: str, inputs: Array) -> Array:
    """Applies an activation to [M, N] in float32 or wider: [M, N / num_parts]."""
    wide = inputs.astype(jnp.promote_types(inputs.dtype, jnp.float32))
    if activation == "swiglu":
        gate, value = jnp.split(wide, 2, axis=1)
        return jax.nn.silu(gate) * value
    if activation == "clamped_swiglu":
        return clamped_swiglu(*jnp.split(wide, 2, axis=1))
    return {"gelu": jax.nn.gelu, "relu": jax.nn.relu}[activation](wide)


def clamped_swiglu(gate: Array, value: Array) -> Array:
    """Applies the SwiGLU of gpt-oss: `g * sigmoid(1.702 * g) * (v + 1)`.

    `g` is `min(gate, 7)` and `v` is `clip(value, -7, 7)`.

    Reference:
        gpt-oss (arXiv:2508.10925), section 2.
    """
    gate, value = jnp.minimum(gate, LIMIT), jnp.clip(value, -LIMIT, LIMIT)
    return gate * jax.nn.sigmoid(SLOPE * gate) * (value + 1.0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tiles of rows, each within one group.

    Args:
        rows: int32[tiles], rows of the tile; 0 for tiles that no group needs.
    """

    group: Array
    start: Array
    rows: Array


def make_tiles(sizes: Array, num_rows: int, tile_rows: int) -> Tiles:
    """Divides groups of adjacent rows into tiles of at most `tile_rows` rows.

    `sizes` may be traced, so the number of tiles is the most that any sizes need.

    Example:
        >>> tiles = make_tiles(jnp.array([3, 0, 2]), num_rows=5, tile_rows=2)
        >>> [x.tolist() for x in (tiles.group, tiles.start, tiles.rows)]
        [[0, 0, 2, 2, 2, 2], [0, 2, 3, 5, 5, 5], [2, 1, 2, 0, 0, 0]]
    """
    number = -(-num_rows // tile_rows) + sizes.size
    ends, last = jnp.cumsum(sizes), sizes.size - 1
    tile_ends = jnp.cumsum(-(-sizes // tile_rows))
    tile = jnp.arange(number, dtype=jnp.int32)
    # As one comparison of all pairs: a search would be a loop of small kernels.
    group = jnp.searchsorted(tile_ends, tile, side="right", method="compare_all")
    group = jnp.minimum(group, last)
    first_tile = jnp.where(group > 0, tile_ends[group - 1], 0)
    start = ends[group] - sizes[group] + (tile - first_tile) * tile_rows
    start = jnp.minimum(start, ends[group])
    return Tiles(group, start, jnp.minimum(ends[group] - start, tile_rows))


TILE_ROWS = 128


def grouped_matmul(
    x: Array,
    weights: Array,
    sizes: Array,
    bias: Array | None = None,
    *,
    transpose: bool = False,
) -> Array:
    """Multiplies each row by the matrix of the group and adds the bias of the group."""
    columns = weights.shape[1 if transpose else 2]
    if abstract.is_abstract():
        # Tiles below pad groups; the product needs each row once.
        flops = abstract.product_flops(*x.shape, columns)
        result = jax.ShapeDtypeStruct((len(x), columns), x.dtype)
        return abstract.call((x, weights), [result], flops=flops)[0]
    rows = _tile_rows(x, sizes)
    offsets = jnp.arange(rows)[:, None]

    def multiply(out: Array, tile: Any) -> tuple[Array, None]:
        part = jax.lax.dynamic_slice_in_dim(padded, tile.start, rows)
        matrix = weights[tile.group].T if transpose else weights[tile.group]
        product = jnp.dot(part, matrix, preferred_element_type=jnp.float32)
        if bias is not None:
            product += bias[tile.group][None]
        product = product.astype(x.dtype)
        # Rows beyond the tile belong to later tiles, or to no group and stay 0.
        before = jax.lax.dynamic_slice_in_dim(out, tile.start, rows)
        product = jnp.where(offsets < tile.rows, product, before)
        return jax.lax.dynamic_update_slice_in_dim(out, product, tile.start, 0), None

    # Padded, as `dynamic_slice` shifts slices that reach beyond the end.
    padded = jnp.pad(x, ((0, rows), (0, 0)))
    out = jnp.zeros((len(padded), columns), x.dtype)
    # One tile at a time: a batched product would copy a matrix for every tile.
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
    """Applies an activation to `grouped_matmul`; returns pre-activations if `saves`."""
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
    """Returns cotangents of `inputs`, scaled activations, and cotangents of `scale`."""
    product = grouped_matmul(cotangent, weights, sizes, transpose=True)
    run = functools.partial(activate, activation)
    activated, differentiate = jax.vjp(run, inputs)
    scales, product = scale[:, None], product.astype(activated.dtype)
    (gradients,) = differentiate((product * scales).astype(activated.dtype))
    # The cotangent of `scale` without a product: <c, a @ W> = <c @ W.T, a>.
    products = (activated * product).sum(1).astype(jnp.float32)
    return gradients, (activated * scales).astype(inputs.dtype), products


def grouped_outer(x: Array, y: Array, sizes: Array) -> Array:
    """Multiplies `x` transposed by `y` within each group: [G, K, N], 0 if empty."""
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
    """Sums the rows of each group, times `scale`, in float32: [G, N], 0 if empty."""
    row = jnp.arange(len(x))
    # Rows without a group get number len(sizes), which `segment_sum` drops.
    group = jnp.searchsorted(jnp.cumsum(sizes), row, side="right")
    rows = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    rows = rows if scale is None else rows * scale[:, None]
    sums = jax.ops.segment_sum(rows, group, len(sizes), indices_are_sorted=True)
    return sums.astype(x.dtype)


def copy_rows(x: Array, sources: Array, targets: Array) -> Array:
    """Returns `x[sources]`; the kernels alone read `targets`."""
    del targets
    return jnp.take(x, sources, axis=0, mode="clip")


def _tile_rows(x: Array, sizes: Array) -> int:
    """Returns the rows of a tile: few for small groups, as padding is computed too."""
    even = -(-len(x) // sizes.size)
    return max(1, min(TILE_ROWS, even))
