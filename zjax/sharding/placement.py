"""One array's plan: where it is stored and where it is used; and moves between them.

JAX refuses shards of unequal size at the border of a program, so an array that does not
divide is stored with zeros at the end. Programs unpad what they take and pad what they
give back: no mathematics ever sees the padding.
"""

import dataclasses
import enum
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from zjax.sharding import rules, zero


class Form(enum.Enum):
    """How the elements of an array are stored.

    Zeros at the end are no form: where `ArrayPlan.stored` does not divide an array, it
    has them in any form.
    """

    PLAIN = "plain"
    """As they are used."""
    SPLIT = "split master weights"
    """The low 16 bits of float32 weights (`zjax.optim.split_master`); the compute
    parameters are the high ones."""


@dataclasses.dataclass(frozen=True)
class ArrayPlan:
    """Where one array is stored, where it is used, and in which form it is stored.

    An all-gather goes from `stored` to `used`, a reduce-scatter from `used` to
    `stored`, whatever the axes. Those of `used` are the first of those of `stored`, in
    each dim. A gradient is added up over the axes that split the batch, but for those
    that split the array where it is used: there each device has a part of its own.

        array                            stored over    used over   form
        ---------------------------------------------------------------------
        parameter in use, stage 0 to 2   -              -           plain
        parameter in use, stage 3        data           -           plain
        kernel, tensor parallel          tensor, data   tensor      plain
        kernel of experts                expert, data   expert      plain
        offloaded master weights         data           -           split

    What ZeRO++ (arXiv:2306.10209) adds is one more value in this table. The second
    placement of hpZ is that of the parameters in use: stored over `data`, the devices
    of one host, while master weights are stored over `replica` too. A quantised gather
    is a form, blocks of int8 with their scales, which goes over the links as it is
    stored and is made plain where it is used.

    Args:
        path: Where the array sits in its tree, parts separated by `/`.
        shape: Shape as the mathematics sees it.
        dtype: Element type as the mathematics sees it.
        stored: Mesh, axes of each dim and memory where the array is stored.
        used: Mesh and axes of each dim where the model reads it, or gives its gradient.
        form: How it is stored.
        num_layers: Equal layers that the first dim stacks; 0 where it is no stack.
        disks: Directories of the disks among which it rests; none for arrays in memory.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    stored: NamedSharding
    used: NamedSharding
    form: Form = Form.PLAIN
    num_layers: int = 0
    disks: tuple[str, ...] = ()

    @property
    def spec(self) -> PartitionSpec:
        """Mesh axes of each dim where the array is stored."""
        return self.stored.spec

    @functools.cached_property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in memory, each dim rounded up to its number of shares."""
        return zero.stored_shape(self.shape, self.spec, self.stored.mesh)

    @property
    def stored_dtype(self) -> Any:
        """Element type in memory."""
        return jnp.dtype("int16") if self.form is Form.SPLIT else self.dtype

    @property
    def gathered_axes(self) -> list[tuple[str, ...]]:
        """The axes of each dim over which an array is stored but not used in shares."""
        rank = len(self.shape)
        dims = zip(
            rules.axes_of(self.spec, rank),
            rules.axes_of(self.used.spec, rank),
            strict=True,
        )
        return [stored[len(used) :] for stored, used in dims]

    @functools.cached_property
    def memory(self) -> str:
        """Where the array is stored: `device`, `pinned_host` or `nvme`."""
        return "nvme" if self.disks else self.stored.memory_kind or "device"

    @property
    def is_on_device(self) -> bool:
        """Whether the array is stored on the devices."""
        return self.memory == "device"

    @property
    def is_on_host(self) -> bool:
        """Whether the array is stored in pinned memory of the host."""
        return self.memory == "pinned_host"

    @property
    def is_on_disk(self) -> bool:
        """Whether the array is stored on disks."""
        return bool(self.disks)

    @functools.cached_property
    def device_bytes(self) -> int:
        """Bytes on one device, padding included."""
        shard = self.stored.shard_shape(self.stored_shape)
        return math.prod(shard) * dtype_bytes(self.stored_dtype)

    @property
    def layer(self) -> "ArrayPlan":
        """The plan of one of the layers."""
        return dataclasses.replace(
            self,
            shape=self.shape[1:],
            stored=_of_layer(self.stored),
            used=_of_layer(self.used),
            num_layers=0,
        )

    @property
    def on_device(self) -> "ArrayPlan":
        """The same plan, stored on the devices."""
        return self.stored_in("device")

    @property
    def on_host(self) -> "ArrayPlan":
        """The same plan, stored in pinned memory of the host."""
        return self.stored_in("pinned_host")

    @property
    def staged(self) -> "ArrayPlan":
        """The plan of the device copy of any array like this one.

        It has no path, so that one compiled program serves all of them.
        """
        return dataclasses.replace(self.on_device, path="")

    def stored_in(self, memory: str, disks: tuple[str, ...] = ()) -> "ArrayPlan":
        """The same plan in another memory.

        Args:
            memory: `device`, `pinned_host` or `nvme`.
            disks: Directories for `nvme`.

        Returns:
            The plan; the copy on the devices of an array on disks has its sharding.
        """
        if memory == "nvme":
            return dataclasses.replace(self.on_device, disks=disks)
        stored = self.stored.with_memory_kind(memory)
        return dataclasses.replace(self, stored=stored, disks=())

    @property
    def passing(self) -> "ArrayPlan":
        """Old name of `staged`."""
        return self.staged

    def rest_in(self, memory: str) -> "ArrayPlan":
        """Old name of `stored_in`."""
        return self.stored_in(memory)

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        """The stored array without its data."""
        return jax.ShapeDtypeStruct(
            self.stored_shape, self.stored_dtype, sharding=self.stored
        )


def _of_layer(sharding: NamedSharding) -> NamedSharding:
    return sharding.update(spec=PartitionSpec(*sharding.spec[1:]))


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
        stored = jax.lax.with_sharding_constraint(pad(x, row), row.stored)
        return unpad(stored, row)

    return jax.tree.map(place, tree, rows)


def use_tree(tree: Any, rows: Any) -> Any:
    """Pins where arrays are used inside a program.

    Args:
        tree: Arrays in their logical shapes, traced by `jit`.
        rows: A tree of `ArrayPlan` of the same structure.

    Returns:
        The same values; the compiler must lay them out as the rows say.
    """
    return jax.tree.map(
        lambda x, row: jax.lax.with_sharding_constraint(x, row.used), tree, rows
    )


def shardings(rows: Any) -> Any:
    """The sharding of each row, as `jit` takes them.

    Args:
        rows: A tree of `ArrayPlan`.

    Returns:
        A tree of NamedSharding.
    """
    return jax.tree.map(lambda row: row.stored, rows)


def abstract_tree(rows: Any) -> Any:
    """The stored arrays without their data.

    Args:
        rows: A tree of `ArrayPlan`.

    Returns:
        A tree of ShapeDtypeStruct that carry their shardings.
    """
    return jax.tree.map(lambda row: row.abstract, rows)
