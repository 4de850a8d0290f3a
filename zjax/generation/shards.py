"""Data shards: groups of devices, each of which reads and writes some of the rows.

Each pair of an index along `replica` and one along `data` is a shard; the devices of a
shard split experts, heads and matrices. Arrays of rows and pages have the shards one
after another in the first dim. A program of a pass is mapped over the shards by hand,
so that no collective crosses shards, and kernels see local arrays.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from zjax.sharding.activations import open_size, pin_everywhere
from zjax.sharding.mesh import DATA, REPLICA, entry


def shard_axes() -> tuple[str, ...]:
    """Returns the axes of the mesh in use that split rows, major first.

    Example:
        >>> shard_axes()
        ()
    """
    return tuple(axis for axis in (REPLICA, DATA) if open_size(axis) > 1)


def num_shards(axes: tuple[str, ...]) -> int:
    """Counts the data shards of the mesh in use.

    Example:
        >>> num_shards(())
        1
    """
    return math.prod(map(open_size, axes))


def by_shard(
    run: Callable[..., Any], axes: tuple[str, ...], ins: Any, outs: Any
) -> Callable[..., Any]:
    """Maps a function over data shards; the compiler partitions within each shard.

    `ins` and `outs` have the dim of rows of each argument and result, or None for what
    all shards have alike. Without axes, the function is returned.
    """
    if not axes:
        return run
    mesh = jax.sharding.get_abstract_mesh()
    others = [axis for axis in mesh.auto_axes if axis not in axes]
    # Axes of size 1 too, if that leaves no axis to the compiler: kernels need it.
    is_rest_open = any(open_size(axis) > 1 for axis in others)

    def spec(dim: int | None) -> PartitionSpec:
        return spec_of(axes, dim)

    def is_none(x: Any) -> bool:
        return x is None

    return jax.shard_map(
        run,
        in_specs=jax.tree.map(spec, ins, is_leaf=is_none),
        out_specs=jax.tree.map(spec, outs, is_leaf=is_none),
        axis_names={*axes} if is_rest_open else {*axes, *others},
        check_vma=False,
    )


def spec_of(axes: tuple[str, ...], dim: int | None = 0) -> PartitionSpec:
    """Returns the spec of arrays with rows in a dim; None for no rows."""
    return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, entry(axes))


def send(arrays: Any, axes: tuple[str, ...]) -> Any:
    """Sends arrays of the host to the devices of the mesh in use, rows to each shard.

    All processes have equal arrays, and each sends what the devices of the process
    hold.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return jax.device_put(arrays)
    sharding = NamedSharding(jax.sharding.get_mesh(), spec_of(axes))

    def place(x: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)

    return jax.tree.map(place, arrays)


def pin_results(results: Any) -> Any:
    """Replicates small results where several processes read them, outside shards."""
    if jax.process_count() == 1:
        return results
    return jax.tree.map(pin_everywhere, results)
