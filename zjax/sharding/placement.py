"""One array's place: shape, stored shape and sharding; and moves between them.

JAX refuses shards of unequal size at the border of a program, so an array that does not
divide is stored with zeros at the end. Programs unpad what they take and pad what they
give back: no mathematics ever sees the padding.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


class LayerKey(jax.tree_util.DictKey):
    """The key of a layer among those that one array would stack.

    It reads as the name of that array, so that rules that go by names find it, and does
    not count as a part of a path: a layer has the path of its stack.

    Args:
        name: Of the array.
        layer: Number of the layer, from 0 on.
    """

    def __init__(self, name: str, layer: int):
        super().__init__(name)
        self.layer = layer


@dataclasses.dataclass(frozen=True)
class ArrayPlan:
    """The place of one array of a plan.

    Args:
        path: Where the array sits in its tree, parts separated by `/`.
        shape: Shape as the mathematics sees it.
        stored_shape: Shape in memory, each dim rounded up to its number of shares.
        dtype: Element type.
        sharding: Mesh, spec and memory.
        num_layers: Equal layers that the first dim stacks; 0 where it is no stack.
        disks: Directories of the disks among which it rests; none for arrays in memory.
        half_of: Element type of the weights of which this is the lower half, as of
            `zjax.optim.halves`; None for all other arrays.
    """

    path: str
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    dtype: Any
    sharding: NamedSharding
    num_layers: int = 0
    disks: tuple[str, ...] = ()
    half_of: Any = None

    @property
    def spec(self) -> PartitionSpec:
        """Mesh axes of each dim."""
        return self.sharding.spec

    @functools.cached_property
    def memory(self) -> str:
        """`device`, `pinned_host` or `nvme`."""
        return "nvme" if self.disks else self.sharding.memory_kind or "device"

    @functools.cached_property
    def device_bytes(self) -> int:
        """Bytes on one device, padding included."""
        return math.prod(self.sharding.shard_shape(self.stored_shape)) * dtype_bytes(
            self.dtype
        )

    @property
    def layer(self) -> "ArrayPlan":
        """The place of one of the layers."""
        spec = PartitionSpec(*self.spec[1:])
        return dataclasses.replace(
            self,
            shape=self.shape[1:],
            stored_shape=self.stored_shape[1:],
            sharding=self.sharding.update(spec=spec),
            num_layers=0,
        )

    @property
    def lower_half(self) -> "ArrayPlan":
        """The place of what is left of weights beside their upper half."""
        return dataclasses.replace(self, dtype=jnp.dtype("int16"), half_of=self.dtype)

    @property
    def whole(self) -> "ArrayPlan":
        """The place of the weights of which this is one half, or of all others."""
        dtype = self.half_of or self.dtype
        return dataclasses.replace(self, dtype=dtype, half_of=None)

    @property
    def passing(self) -> "ArrayPlan":
        """The place on the devices of any array like this one.

        It has no path, for what is compiled once for all of them.
        """
        return dataclasses.replace(self.rest_in("device"), path="")

    def rest_in(self, memory: str) -> "ArrayPlan":
        """The same place in another memory, which JAX calls by the same name."""
        sharding = self.sharding.with_memory_kind(memory)
        return dataclasses.replace(self, sharding=sharding, disks=())

    def rest_on(self, disks: tuple[str, ...]) -> "ArrayPlan":
        """The same place on disks, from which arrays go to the devices."""
        return dataclasses.replace(self.rest_in("device"), disks=disks)

    def rest_at(self, memory: str, disks: tuple[str, ...]) -> "ArrayPlan":
        """The same place in another memory, or on these disks where that is `nvme`."""
        return self.rest_on(disks) if memory == "nvme" else self.rest_in(memory)

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        """The stored array without its data."""
        return jax.ShapeDtypeStruct(
            self.stored_shape, self.dtype, sharding=self.sharding
        )


def abstract_key() -> jax.ShapeDtypeStruct:
    """A random key for what is only traced: JAX need not have started.

    Returns:
        The shape and dtype of `jax.random.key(0)`.
    """
    return jax.eval_shape(jax.random.key, 0)


def num_distinct_shards(sharding: Any, shape: tuple[int, ...]) -> int:
    """How many different parts of an array the devices of this process hold.

    Args:
        sharding: Of the array.
        shape: As stored.

    Returns:
        1 or more; replicas count once.
    """
    indices = sharding.addressable_devices_indices_map(shape).values()
    return len({str(index) for index in indices})


def dtype_bytes(dtype: Any) -> int:
    """Bytes of one element; a random key counts its words.

    Args:
        dtype: A NumPy or JAX dtype.

    Returns:
        Bytes, 1 or more.

    Example:
        >>> dtype_bytes(jnp.bfloat16)
        2
    """
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return (
            jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype)).size
            * 4
        )
    return np.dtype(dtype).itemsize


def pad(x: jax.Array, row: ArrayPlan) -> jax.Array:
    """Appends the zeros of storage.

    Args:
        x: Array of `row.shape`.
        row: Its place.

    Returns:
        Array of `row.stored_shape`; `x` itself where they agree.
    """
    if row.shape == row.stored_shape:
        return x
    widths = [(0, s - n) for n, s in zip(row.shape, row.stored_shape, strict=True)]
    return jnp.pad(x, widths)


def unpad(x: jax.Array, row: ArrayPlan) -> jax.Array:
    """Cuts the zeros of storage off.

    Args:
        x: Array of `row.stored_shape`.
        row: Its place.

    Returns:
        Array of `row.shape`; `x` itself where they agree.
    """
    return x if row.shape == row.stored_shape else x[tuple(map(slice, row.shape))]


def pad_tree(tree: Any, rows: Any) -> Any:
    """`pad` for each array of a tree.

    Args:
        tree: Arrays in their logical shapes.
        rows: A tree of `ArrayPlan` of the same structure.

    Returns:
        Arrays in their stored shapes.
    """
    return jax.tree.map(pad, tree, rows)


def unpad_tree(tree: Any, rows: Any) -> Any:
    """`unpad` for each array of a tree.

    Args:
        tree: Arrays in their stored shapes.
        rows: A tree of `ArrayPlan` of the same structure.

    Returns:
        Arrays in their logical shapes.
    """
    return jax.tree.map(unpad, tree, rows)


def place_tree(tree: Any, rows: Any) -> Any:
    """Pins the placement of arrays inside a program.

    Args:
        tree: Arrays in their logical shapes, traced by `jit`.
        rows: A tree of `ArrayPlan` of the same structure.

    Returns:
        The same values; the compiler must lay them out as the rows say.
    """

    def place(x: jax.Array, row: ArrayPlan) -> jax.Array:
        stored = jax.lax.with_sharding_constraint(pad(x, row), row.sharding)
        return unpad(stored, row)

    return jax.tree.map(place, tree, rows)


def shardings(rows: Any) -> Any:
    """The sharding of each row, as `jit` takes them.

    Args:
        rows: A tree of `ArrayPlan`.

    Returns:
        A tree of NamedSharding.
    """
    return jax.tree.map(lambda row: row.sharding, rows)


def abstract_tree(rows: Any) -> Any:
    """The stored arrays without their data.

    Args:
        rows: A tree of `ArrayPlan`.

    Returns:
        A tree of ShapeDtypeStruct that carry their shardings.
    """
    return jax.tree.map(lambda row: row.abstract, rows)


def path_of(keys: Any) -> str:
    """A tree path as text.

    Args:
        keys: Key path of `jax.tree_util`.

    Returns:
        Its parts separated by `/`.

    Example:
        >>> path_of((jax.tree_util.DictKey("blocks"), jax.tree_util.SequenceKey(0)))
        'blocks/0'
    """
    keys = tuple(key for key in keys if not isinstance(key, LayerKey))
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def layer_of(keys: Any) -> int | None:
    """Which layer of its stack a leaf is.

    Args:
        keys: Key path of `jax.tree_util`.

    Returns:
        Its number; None where layers are stacked, and outside of them.

    Example:
        >>> layer_of((jax.tree_util.DictKey("blocks"), LayerKey("kernel", 3)))
        3
    """
    numbers = (key.layer for key in keys if isinstance(key, LayerKey))
    return next(numbers, None)


def name_of(path: str) -> str:
    """The last part of a path, which names an array.

    Args:
        path: Parts separated by `/`.

    Returns:
        One part.

    Example:
        >>> name_of("blocks/mlp/bias")
        'bias'
    """
    return path.rsplit("/", 1)[-1]


def owners(keys: Any, params: Mapping[str, Any]) -> Iterator[Any]:
    """The parameters that a leaf of the optimizer's state may belong to.

    Args:
        keys: Key path of the leaf.
        params: Anything about each parameter, by path.

    Yields:
        The entries whose path is a part of that of the leaf, those nearest to its end
        first, and of these the longest.

    Example:
        >>> keys = map(jax.tree_util.DictKey, ("mu", "blocks", "kernel"))
        >>> list(owners(tuple(keys), {"kernel": 1, "blocks/kernel": 2, "bias": 3}))
        [2, 1]
    """
    names = [path_of((key,)) for key in keys]
    for end in range(len(names), -1, -1):
        for start in range(end + 1):
            path = "/".join(names[start:end])
            if path in params:
                yield params[path]


def position_finder(params: Any) -> Callable[[Any], int | None]:
    """Tells which parameter a leaf of the state belongs to.

    Args:
        params: A tree with one leaf per parameter, or per layer of one.

    Returns:
        A function of the leaf's key path: the position among the leaves of `params`;
        None for a leaf that belongs to none.

    Example:
        >>> position = position_finder({"bias": 0, "kernel": 0})
        >>> position((jax.tree_util.DictKey("mu"), jax.tree_util.DictKey("kernel")))
        1
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    names = [(path_of(keys), layer_of(keys)) for keys, _ in leaves]
    positions = {name: i for i, name in enumerate(names)}
    paths = {path: path for path, _ in names}

    def position(keys: Any) -> int | None:
        found = ((path, layer_of(keys)) for path in owners(keys, paths))
        return next((positions[x] for x in found if x in positions), None)

    return position
