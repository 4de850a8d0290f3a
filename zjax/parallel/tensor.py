"""Tensor parallelism: products with matrices split over the tensor axis of the mesh.

The first matrix of a layer is split by columns, the second by rows, and activations
between the two stay on the device. Between layers the stream is split along the length,
and so are norms, dropout and residual connections (sequence parallelism). An all-gather
before the columns and a reduce-scatter after the rows send as much as the all-reduce
they replace. A length that does not divide is not split, and all-reduced.

Heads, channels and rows of a table that do not divide over the axis are padded with
zeros, whose gradients are dropped.

Reference: Shoeybi et al. (arXiv:1909.08053, section 3); the split of the stream:
Korthikanti et al. (arXiv:2205.05198, section 4.2).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Shaped

from zjax.ops import lookup
from zjax.sharding import mesh as meshes
from zjax.sharding.activations import open_size, pin, pin_whole
from zjax.sharding.mesh import entry

Product = Callable[..., jax.Array]
"""`product(x, kernel, *adapter) -> [B, L, channels]`, on one device."""
Matrix = tuple[jax.Array, ...]
"""A kernel, alone or with the adapter factors [inputs, rank] and [rank, outputs] (LoRA,
arXiv:2106.09685)."""

# Specs of a kernel and of both factors of the adapter, whose rank is never split.
_COLUMNS = P(None, meshes.TENSOR), P(), P(None, meshes.TENSOR)
_ROWS = P(meshes.TENSOR), P(meshes.TENSOR), P()


def num_shares() -> int:
    """Size of the tensor axis of the mesh in use.

    The size is 1 without `jax.set_mesh`, and inside `shard_map` over the axis.

    Example:
        >>> num_shares()
        1
    """
    return open_size(meshes.TENSOR)


def fill_up(
    x: Shaped[Array, "..."], dim: int, shares: int | None = None
) -> Shaped[Array, "..."]:
    """Pads a dim with zeros to a multiple of `shares`."""
    missing = -x.shape[dim] % (shares or num_shares())
    if not missing:
        return x
    return jnp.pad(x, [(0, missing * (i == dim)) for i in range(x.ndim)])


class Heads(NamedTuple):
    """Layout of heads over the tensor axis; each group is on one device.

    Devices that share a head of keys and values each have a copy of the head, and equal
    parts of the queries. The last parts and the last groups are padded with zeros.

    Args:
        copies: Copies of each head of keys and values.
        group: Heads of queries per copy, padding included.
    """

    kv_heads: int
    copies: int
    group: int

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, shares: int) -> "Heads":
        """Chooses the layout for a model.

        Example:
            >>> Heads.of(28, 4, 8)
            Heads(kv_heads=4, copies=2, group=4)
        """
        is_shared = num_kv_heads < num_heads and shares % num_kv_heads == 0
        copies = shares // num_kv_heads if is_shared else 1
        return cls(num_kv_heads, copies, -(-num_heads // (num_kv_heads * copies)))

    def lay_queries(self, x: Shaped[Array, "..."], dim: int) -> Shaped[Array, "..."]:
        """Pads the heads of query weights, in dim `dim`, to this layout."""
        before, after = x.shape[:dim], x.shape[dim + 1 :]
        queries = self.copies * self.group
        # Padding goes to the end of each group: queries must stay with the head of
        # keys.
        if x.shape[dim] != self.kv_heads * queries:
            groups = x.reshape(*before, self.kv_heads, -1, *after)
            x = fill_up(groups, dim + 1, queries).reshape(*before, -1, *after)
        return fill_up(x, dim, num_shares() * self.group)

    def lay_keys(self, x: Shaped[Array, "..."], dim: int) -> Shaped[Array, "..."]:
        """Copies and pads the heads of key or value weights, in dim `dim`."""
        return fill_up(jnp.repeat(x, self.copies, dim) if self.copies > 1 else x, dim)


def laid_heads(num_heads: int, num_kv_heads: int) -> tuple[int, int]:
    """Numbers of query and key heads in the layout on the mesh, padding included."""
    shares = num_shares()
    layout = Heads.of(num_heads, num_kv_heads, shares)
    keys = -(-num_kv_heads * layout.copies // shares) * shares
    return keys * layout.group, keys


def number_heads(num_heads: int, num_kv_heads: int) -> Int[Array, " H"]:
    """Numbers the heads of queries in the layout on the mesh in use; 0 for padding.

    Example:
        >>> number_heads(4, 2).tolist()
        [0, 1, 2, 3]
    """
    layout = Heads.of(num_heads, num_kv_heads, num_shares())
    return layout.lay_queries(jnp.arange(num_heads, dtype=jnp.int32), 0)


def axes_of_length(x: Float[Array, "B L ..."]) -> tuple[str, ...]:
    """Axes of the mesh in use that split the length of a stream."""
    return _Split.of(x).length


def pin_stream(x: Float[Array, "B L M"]) -> Float[Array, "B L M"]:
    """Pins a stream, split along the length, where the sequence axis splits it."""
    if open_size(meshes.SEQUENCE) == 1:
        return x
    return pin(x, *_Split.of(x).stream, *[P.UNCONSTRAINED] * (x.ndim - 2))


def by_parts(run: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Runs a collective over axes mapped by hand on each device's shard of a stream.

    The compiler alone would gather the stream first.
    """
    place = _Split.of(x).stream if x.ndim > 1 else P()
    return _map_open_axes(run, place, place)(x)


def map_tokens(
    run: Callable[..., tuple[Any, Any]],
    x: Float[Array, "B L M"],
    masks: Any,
    weights: Any,
    specs: Any,
) -> tuple[Any, Any]:
    """Runs a function that compares tokens, such as a router, on each device's tokens.

    `run(x, masks, weights, part)` returns arrays [B, L, N] of tokens, such as the
    stream, and numbers; `part` counts the parts of the length. Numbers get a first dim
    of devices.
    """

    def region(*operands: Any) -> tuple[Any, Any]:
        part = jax.lax.axis_index(split.length) if split.length else 0
        y, numbers = run(*operands, part)
        # Concatenated over devices, as replicated results would have to be equal.
        return y, jax.tree.map(lambda number: number[None], numbers)

    mesh, split = jax.sharding.get_abstract_mesh(), _Split.of(x)
    if all(mesh.shape[axis] == 1 for axis in mesh.auto_axes):
        return region(x, masks, weights)
    in_specs = split.stream, jax.tree.map(lambda _: split.stream, masks), specs
    devices = P(entry((*split.batch, *split.length)))
    return _map_open_axes(region, in_specs, (split.stream, devices))(x, masks, weights)


def join_stream(x: Float[Array, "B L M"]) -> Float[Array, "B L M"]:
    """Gathers a stream along the length over the tensor axis."""
    if num_shares() == 1:
        return x
    channels = [P.UNCONSTRAINED] * (x.ndim - 2)
    spec = P(P.UNCONSTRAINED, entry(_Split.of(x).others), *channels)
    return jax.lax.with_sharding_constraint(x, spec)


def multiply_columns(
    products: Sequence[Product], x: Float[Array, "B L M"], matrices: Sequence[Matrix]
) -> tuple[Float[Array, "B L N"], ...]:
    """Multiplies a stream by matrices that are split by columns.

    The stream is gathered once for all matrices; the backward pass adds the cotangents
    before it scatters the sum. The second dims of kernels divide over the tensor axis.
    """
    split = _Split.of(x)

    def region(x: jax.Array, *matrices: Matrix) -> tuple[jax.Array, ...]:
        if split.is_scattered:
            x = jax.lax.all_gather(x, meshes.TENSOR, axis=1, tiled=True)
        return tuple(f(x, *m) for f, m in zip(products, matrices, strict=True))

    if num_shares() == 1:
        return region(x, *matrices)
    return _map_open_axes(
        region,
        (split.stream, *(_COLUMNS[: len(matrix)] for matrix in matrices)),
        (split.columns,) * len(matrices),
    )(x, *matrices)


def multiply_rows(
    product: Product, x: Float[Array, "B L *N"], matrix: Matrix
) -> Float[Array, "B L M"]:
    """Multiplies activations, split along the third dim, by a matrix split by rows."""
    split = _Split.of(x)
    return split.sum(product, (split.columns, *_ROWS[: len(matrix)]))(x, *matrix)


def look_up(
    table: Float[Array, "V M"], indices: Int[Array, "B L"], deterministic: bool = False
) -> Float[Array, "B L M"]:
    """Looks up rows of a table that is split by rows over tensor and pipeline axis."""
    axes = tuple(a for a in (meshes.PIPELINE, meshes.TENSOR) if open_size(a) > 1)
    if not axes:
        return lookup.look_up(pin_whole(table), indices, deterministic)

    def local_rows(indices: jax.Array, rows: jax.Array) -> jax.Array:
        indices -= jax.lax.axis_index(axes) * rows.shape[0]
        is_local = (indices >= 0) & (indices < rows.shape[0])
        indices = jnp.where(is_local, indices, 0)
        local: Any = lookup.look_up(rows, indices, deterministic)
        return jnp.where(is_local[..., None], local, 0)

    split = _Split.of(indices)
    specs = P(split.rows, entry(split.others)), P(axes)
    table = fill_up(table, 0, math.prod(map(open_size, axes)))
    return split.sum(local_rows, specs, axes)(indices, table)


class _Split(NamedTuple):
    """Mesh axes over which rows and length of activations are split."""

    batch: tuple[str, ...]
    length: tuple[str, ...]

    @classmethod
    def of(cls, x: jax.Array) -> "_Split":
        """Splits rows over batch axes, and length over sequence and tensor axis."""
        return cls(
            _axes_for(meshes.BATCH_AXES, x.shape[0]),
            _axes_for((meshes.SEQUENCE, meshes.TENSOR), x.shape[1]),
        )

    @property
    def is_scattered(self) -> bool:
        """Whether the tensor axis splits the length."""
        return meshes.TENSOR in self.length

    @property
    def others(self) -> tuple[str, ...]:
        """Axes that split the length besides the tensor axis."""
        return tuple(axis for axis in self.length if axis != meshes.TENSOR)

    @property
    def rows(self) -> str | tuple[str, ...] | None:
        """Entry of a spec for the rows."""
        return entry(self.batch)

    @property
    def stream(self) -> P:
        """Spec of a stream between layers."""
        return P(self.rows, entry(self.length))

    @property
    def columns(self) -> P:
        """Spec of activations inside a layer, split by channels."""
        return P(self.rows, entry(self.others), meshes.TENSOR)

    def sum(
        self,
        summand: Callable[..., jax.Array],
        specs: Any,
        axes: tuple[str, ...] = (meshes.TENSOR,),
    ) -> Any:
        """Sums the results of the devices along mesh axes."""
        scatters = self.is_scattered and meshes.TENSOR in axes
        stacked = tuple(a for a in axes if not (scatters and a == meshes.TENSOR))
        stacked = tuple(a for a in stacked if open_size(a) > 1)
        if not scatters and not stacked:
            return summand

        def part(*parts: jax.Array) -> jax.Array:
            summed = summand(*parts)
            if scatters:
                summed = jax.lax.psum_scatter(
                    summed, meshes.TENSOR, scatter_dimension=1, tiled=True
                )
            return summed[None] if stacked else summed

        if not stacked:
            return _map_open_axes(part, specs, self.stream)
        # Summed outside of `shard_map`: a psum inside would sum the gradient twice.
        mapped = _map_open_axes(part, specs, P(entry(stacked), *self.stream))
        return lambda *arrays: mapped(*arrays).sum(0)


def _map_open_axes(body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
    """Maps a function over all mesh axes that are left to the compiler."""
    # All axes, as the compiler would gather over an axis that is left out.
    axes = set(jax.sharding.get_abstract_mesh().auto_axes)
    return jax.shard_map(
        body, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False
    )


def _axes_for(candidates: Sequence[str], size: int) -> tuple[str, ...]:
    """Longest prefix of mesh axes over which a dim divides."""
    mesh = jax.sharding.get_abstract_mesh()
    axes: tuple[str, ...] = ()
    for axis in candidates:
        if axis not in mesh.auto_axes or mesh.shape[axis] == 1:
            continue
        if size % meshes.num_shares(mesh, (*axes, axis)):
            break
        axes = (*axes, axis)
    return axes
