"""Products with matrices that are split over the tensor axis of the mesh in use.

A matrix that leaves the stream is split by columns, one that comes back to it by rows,
and whatever lies between them stays on its device. Around them the stream is split
along its length, so that norms, dropout and the residual are too: a gather before the
columns and a sum that is scattered after the rows move as much as the one sum of whole
streams that they replace. A length that does not divide is not split, and summed whole.

Heads, channels and rows of a table that do not divide over the axis are filled up with
zeros, which reach no sum and whose gradients are cut off.

Reference: Shoeybi et al. (arXiv:1909.08053, section 3); the split of the stream:
Korthikanti et al. (arXiv:2205.05198, section 4.2).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from zjax.ops import lookup
from zjax.sharding import mesh as meshes
from zjax.sharding.activations import open_size, pin, pin_whole
from zjax.sharding.rules import entry

Product = Callable[[jax.Array, jax.Array], jax.Array]
"""`product(x, kernel) -> [B, L, channels]`, on one device."""


def num_shares() -> int:
    """Parts in which the devices hold each matrix.

    Returns:
        Size of the tensor axis of the mesh set by `jax.set_mesh`; 1 without a mesh, and
        where the axis is split by hand already.

    Example:
        >>> num_shares()
        1
    """
    return open_size(meshes.TENSOR)


def fill_up(
    x: Float[Array, "..."], dim: int, shares: int | None = None
) -> Float[Array, "..."]:
    """Appends zeros until a dim divides.

    Args:
        x: Weights.
        dim: The dim that is split.
        shares: Into how many parts; as many as the tensor axis has devices by default.

    Returns:
        Weights; `x` itself where its dim divides.

    Example:
        >>> fill_up(jnp.ones((2, 3)), 1).shape
        (2, 3)
    """
    missing = -x.shape[dim] % (shares or num_shares())
    if not missing:
        return x
    return jnp.pad(x, [(0, missing * (i == dim)) for i in range(x.ndim)])


class Heads(NamedTuple):
    """How heads stand on the devices of the tensor axis, those of a group together.

    Devices that share a head of keys and values have a copy of it each, and its queries
    in equal parts; zeros fill up the last part, as they do the last groups.

    Args:
        kv_heads: Heads of keys and values.
        copies: Of each of them.
        group: Heads of queries per copy, zeros included.
    """

    kv_heads: int
    copies: int
    group: int

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, shares: int) -> "Heads":
        """The heads of a model, over some devices.

        Args:
            num_heads: Of queries.
            num_kv_heads: Of keys and values; a divisor.
            shares: Devices of the tensor axis.

        Returns:
            How they stand.

        Example:
            >>> Heads.of(28, 4, 8)
            Heads(kv_heads=4, copies=2, group=4)
        """
        is_shared = num_kv_heads < num_heads and shares % num_kv_heads == 0
        copies = shares // num_kv_heads if is_shared else 1
        return cls(num_kv_heads, copies, -(-num_heads // (num_kv_heads * copies)))

    def lay_queries(self, x: Float[Array, "..."], dim: int) -> Float[Array, "..."]:
        """Weights of queries, as their heads stand.

        Args:
            x: Weights.
            dim: That of the heads.

        Returns:
            Weights with as many heads on each device; `x` itself where they are.
        """
        before, after = x.shape[:dim], x.shape[dim + 1 :]
        whole = self.copies * self.group
        if x.shape[dim] != self.kv_heads * whole:
            groups = x.reshape(*before, self.kv_heads, -1, *after)
            x = fill_up(groups, dim + 1, whole).reshape(*before, -1, *after)
        return fill_up(x, dim, num_shares() * self.group)

    def lay_keys(self, x: Float[Array, "..."], dim: int) -> Float[Array, "..."]:
        """Weights of keys or values, as their heads stand.

        Args:
            x: Weights.
            dim: That of the heads.

        Returns:
            Weights with as many heads on each device; `x` itself where they are.
        """
        return fill_up(jnp.repeat(x, self.copies, dim) if self.copies > 1 else x, dim)


def pin_stream(x: Float[Array, "B L M"]) -> Float[Array, "B L M"]:
    """Keeps a stream where the sequence axis, and with it this one, splits its length.

    Args:
        x: Activations.

    Returns:
        The same values; `x` itself where sequences are not split.
    """
    if open_size(meshes.SEQUENCE) == 1:
        return x
    return pin(x, *_Split.of(x).stream, *[P.UNCONSTRAINED] * (x.ndim - 2))


def by_parts(run: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Calls a function that communicates, on each device's part of a stream.

    Args:
        run: Of arrays of any shape; sends over axes that are split by hand already.
        x: A stream, or a number.

    Returns:
        What the function makes of the parts; a compiler would join them before it.
    """
    place = _Split.of(x).stream if x.ndim > 1 else P()
    return _map_open_axes(run, place, place)(x)


def join_stream(x: Float[Array, "B L M"]) -> Float[Array, "B L M"]:
    """Gives each device of the tensor axis the whole length of a stream.

    Args:
        x: Activations.

    Returns:
        The same values.
    """
    if num_shares() == 1:
        return x
    rest = [P.UNCONSTRAINED] * (x.ndim - 2)
    spec = P(P.UNCONSTRAINED, entry(_Split.of(x).others), *rest)
    return jax.lax.with_sharding_constraint(x, spec)


def multiply_columns(
    products: Sequence[Product], x: Float[Array, "B L M"], kernels: Sequence[jax.Array]
) -> tuple[Float[Array, "B L N"], ...]:
    """Multiplies a stream by matrices that are split by columns.

    The stream is gathered once for all of them, and so are their gradients added before
    they are sent.

    Args:
        products: That with each matrix, on one device.
        x: The stream.
        kernels: Matrices whose second dim divides over the tensor axis.

    Returns:
        One product per matrix, split along its last dim.
    """
    split = _Split.of(x)

    def region(x: jax.Array, *kernels: jax.Array) -> tuple[jax.Array, ...]:
        if split.is_scattered:
            x = jax.lax.all_gather(x, meshes.TENSOR, axis=1, tiled=True)
        return tuple(f(x, kernel) for f, kernel in zip(products, kernels, strict=True))

    if num_shares() == 1:
        return region(x, *kernels)
    return _map_open_axes(
        region,
        (split.stream, *[P(None, meshes.TENSOR)] * len(kernels)),
        (split.columns,) * len(kernels),
    )(x, *kernels)


def multiply_rows(
    product: Product, x: Float[Array, "B L *N"], kernel: jax.Array
) -> Float[Array, "B L M"]:
    """Multiplies activations by a matrix that is split by rows.

    Args:
        product: That with the matrix, on one device.
        x: Activations, split along their third dim.
        kernel: Matrix whose first dim divides over the tensor axis.

    Returns:
        The product, split along its length where that divides.
    """
    split = _Split.of(x)
    return split.sum(product, (split.columns, P(meshes.TENSOR)))(x, kernel)


def look_up(
    table: Float[Array, "V M"], indices: Int[Array, "B L"], deterministic: bool = False
) -> Float[Array, "B L M"]:
    """Rows of a table that is split by rows, each found by the device that holds it.

    Stages of a pipeline, where these are left to the compiler, share the table too.

    Args:
        table: Rows, in any floating dtype.
        indices: Which of them, 0 to V - 1.
        deterministic: Whether gradients are added in the same order each time.

    Returns:
        One row for each index, split along the length where that divides.
    """
    axes = tuple(a for a in (meshes.PIPELINE, meshes.TENSOR) if open_size(a) > 1)
    if not axes:
        return lookup.look_up(pin_whole(table), indices, deterministic)

    def own_rows(indices: jax.Array, rows: jax.Array) -> jax.Array:
        indices -= jax.lax.axis_index(axes) * rows.shape[0]
        is_own = (indices >= 0) & (indices < rows.shape[0])
        found: Any = lookup.look_up(rows, jnp.where(is_own, indices, 0), deterministic)
        return jnp.where(is_own[..., None], found, 0)

    split = _Split.of(indices)
    specs = P(split.rows, entry(split.others)), P(axes)
    table = fill_up(table, 0, math.prod(map(open_size, axes)))
    return split.sum(own_rows, specs, axes)(indices, table)


class _Split(NamedTuple):
    """How the devices of the mesh in use hold rows and lengths of activations."""

    batch: tuple[str, ...]
    length: tuple[str, ...]

    @classmethod
    def of(cls, x: jax.Array) -> "_Split":
        return cls(
            _axes_for(meshes.BATCH_AXES, x.shape[0]),
            _axes_for((meshes.SEQUENCE, meshes.TENSOR), x.shape[1]),
        )

    @property
    def is_scattered(self) -> bool:
        return meshes.TENSOR in self.length

    @property
    def others(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.length if axis != meshes.TENSOR)

    @property
    def rows(self) -> str | tuple[str, ...] | None:
        return entry(self.batch)

    @property
    def stream(self) -> P:
        return P(self.rows, entry(self.length))

    @property
    def columns(self) -> P:
        return P(self.rows, entry(self.others), meshes.TENSOR)

    def sum(
        self,
        summand: Callable[..., jax.Array],
        specs: Any,
        axes: tuple[str, ...] = (meshes.TENSOR,),
    ) -> Any:
        """Adds up what the devices along some axes make of their parts."""
        scatters = self.is_scattered and meshes.TENSOR in axes
        stacked = tuple(a for a in axes if not (scatters and a == meshes.TENSOR))
        stacked = tuple(a for a in stacked if open_size(a) > 1)
        if not scatters and not stacked:
            return summand

        def part(*parts: jax.Array) -> jax.Array:
            own = summand(*parts)
            if scatters:
                own = jax.lax.psum_scatter(
                    own, meshes.TENSOR, scatter_dimension=1, tiled=True
                )
            return own[None] if stacked else own

        if not stacked:
            return _map_open_axes(part, specs, self.stream)
        # Added outside: by hand, the gradient would be added a second time.
        mapped = _map_open_axes(part, specs, P(entry(stacked), *self.stream))
        return lambda *arrays: mapped(*arrays).sum(0)


def _map_open_axes(body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
    # All of them: of one left to it the compiler would gather what it splits.
    axes = set(jax.sharding.get_abstract_mesh().auto_axes)
    return jax.shard_map(
        body, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False
    )


def _axes_for(candidates: Sequence[str], size: int) -> tuple[str, ...]:
    """The first of some axes over which a dim divides."""
    mesh = jax.sharding.get_abstract_mesh()
    axes: tuple[str, ...] = ()
    for axis in candidates:
        if axis not in mesh.auto_axes or mesh.shape[axis] == 1:
            continue
        if size % meshes.num_shares(mesh, (*axes, axis)):
            break
        axes = (*axes, axis)
    return axes
