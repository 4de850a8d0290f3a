"""The plan of one array: where it is stored, where it is used, and how it is padded.

JAX refuses uneven shards in arguments and results of a program, so an array that does
not divide is stored with zeros at the end. Programs unpad arguments and pad results: no
computation sees the padding.
"""

import dataclasses
import enum
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from zjax.sharding import mesh, zero

Follows = Literal["gradient", "totals", "nothing"]
"""Source of the changes of a parameter."""


class Form(enum.Enum):
    """How the elements of an array are stored.

    Padding is independent of the form.
    """

    PLAIN = "plain"
    """As the array is used."""
    SPLIT = "split master weights"
    """The low 16 bits of float32 weights (`zjax.optim.precision`); the compute
    parameters are the high 16 bits."""


@dataclasses.dataclass(frozen=True)
class ArrayPlan:
    """Where one array is stored, where it is used, and in which form it is stored.

    An all-gather goes from `stored` to `used`, a reduce-scatter from `used` to
    `stored`, whatever the axes. In each dim the axes of `used` are the first ones of
    `stored`. Gradients are summed over the batch axes that do not shard `used`.

        array                            stored over    used over   form   codec
        ------------------------------------------------------------------------
        compute parameter, stage 0 to 2  -              -           plain
        compute parameter, stage 3       data           -           plain
        kernel, tensor parallel          tensor, data   tensor      plain
        kernel of experts                expert, data   expert      plain
        offloaded master weights         data           -           split

    and under ZeRO++ (arXiv:2306.10209), where `replica` joins the nodes:

        master weights                   data, replica  -           plain
        gradient, qgZ                    data, replica  -           plain  int4
        compute parameter, qwZ           data, replica  -           plain  int8
        compute parameter, hpZ and qwZ   data           -           plain  int8

    Args:
        shape: Logical shape, without padding.
        dtype: Element type in computations.
        stored: Sharding and memory kind of the stored array.
        used: Sharding where the model reads the array or computes its gradient.
        form: Form of the stored elements.
        num_layers: Number of layers stacked along the first dim; 0 without such a dim.
        disks: Directories over which the array is striped; empty for arrays in memory.
        codec: Name in `zjax.ops.codecs`, such as `int8`, of the codec by which the
            array moves across nodes; empty where elements move unchanged.
        is_frozen: Whether the array is a parameter that is stored as it is used, and
            has neither a gradient nor optimizer state.
        follows: Source of changes of a parameter: `gradient`; `totals` of a step, such
            as the load of experts, which `Segment.moves` reads; or `nothing`.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    stored: NamedSharding
    used: NamedSharding
    form: Form = Form.PLAIN
    num_layers: int = 0
    disks: tuple[str, ...] = ()
    codec: str = ""
    is_frozen: bool = False
    follows: Follows = "gradient"

    @property
    def spec(self) -> PartitionSpec:
        """Spec of the stored array."""
        return self.stored.spec

    @functools.cached_property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the stored array, padding included."""
        return zero.stored_shape(self.shape, self.spec, self.stored.mesh)

    @property
    def stored_dtype(self) -> Any:
        """Element type of the stored array."""
        return jnp.dtype("int16") if self.form is Form.SPLIT else self.dtype

    @property
    def gathered_axes(self) -> list[tuple[str, ...]]:
        """Axes of each dim that shard the stored array but not the used array."""
        rank = len(self.shape)
        dims = zip(
            mesh.axes_of(self.spec, rank),
            mesh.axes_of(self.used.spec, rank),
            strict=True,
        )
        # The axes of `used` are the first axes of `stored`.
        return [stored[len(used) :] for stored, used in dims]

    @functools.cached_property
    def memory(self) -> str:
        """Memory of the stored array: `device`, `pinned_host` or `nvme`."""
        # Shardings of an abstract mesh have no memory kind.
        return "nvme" if self.disks else self.stored.memory_kind or "device"

    @property
    def is_on_device(self) -> bool:
        """Whether the array is stored on the devices."""
        return self.memory == "device"

    @property
    def is_on_disk(self) -> bool:
        """Whether the array is stored on disks."""
        return bool(self.disks)

    @functools.cached_property
    def device_bytes(self) -> int:
        """Bytes on one device, padding included."""
        shard = self.stored.shard_shape(self.stored_shape)
        return array_bytes(shard, self.stored_dtype)

    @property
    def used_bytes(self) -> int:
        """Bytes on one device of the array as the model reads it.

        The layers of a stack are read apart; an array that does not divide over the
        devices is on each of them.
        """
        if self.num_layers:
            return self.num_layers * self.layer.used_bytes
        is_padded = self.shape != self.stored_shape
        shard = self.shape if is_padded else self.used.shard_shape(self.shape)
        return array_bytes(shard, self.dtype)

    @property
    def layer(self) -> "ArrayPlan":
        """Plan of one of the stacked layers."""
        return dataclasses.replace(
            self,
            shape=self.shape[1:],
            stored=_of_layer(self.stored),
            used=_of_layer(self.used),
            num_layers=0,
        )

    @property
    def on_device(self) -> "ArrayPlan":
        """Equal plan, stored on the devices."""
        return self.stored_in("device")

    @property
    def on_host(self) -> "ArrayPlan":
        """Equal plan, stored in pinned memory of the host."""
        return self.stored_in("pinned_host")

    @property
    def staged(self) -> "ArrayPlan":
        """Plan of the device copy of any array with an equal plan.

        The copy has no path, so that one compiled program serves all such arrays.
        """
        return dataclasses.replace(self.on_device, path="")

    def stored_in(self, memory: str, disks: tuple[str, ...] = ()) -> "ArrayPlan":
        """Equal plan in another memory.

        Args:
            memory: `device`, `pinned_host` or `nvme`.
            disks: Directories for `nvme`.

        Returns:
            The plan; for `nvme`, `stored` is the sharding of the copy on the devices.
        """
        if memory == "nvme":
            # `stored` then tells how the copy on the devices is sharded.
            return dataclasses.replace(self.on_device, disks=disks)
        stored = self.stored.with_memory_kind(memory)
        return dataclasses.replace(self, stored=stored, disks=())

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        """Stored array without data."""
        return jax.ShapeDtypeStruct(
            self.stored_shape, self.stored_dtype, sharding=self.stored
        )


def _of_layer(sharding: NamedSharding) -> NamedSharding:
    """Sharding of one layer of a stack."""
    return sharding.update(spec=PartitionSpec(*sharding.spec[1:]))


def abstract_key() -> jax.ShapeDtypeStruct:
    """Abstract value of `jax.random.key(0)`; starts no device."""
    return jax.eval_shape(jax.random.key, 0)


def num_distinct_shards(sharding: Any, shape: tuple[int, ...]) -> int:
    """Number of distinct shards of a stored array on local devices, without copies."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    # As text, since slices are not hashable before Python 3.12.
    return len({str(index) for index in indices})


def dtype_bytes(dtype: Any) -> int:
    """Bytes of one element of a NumPy or JAX dtype; random keys included."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return (
            # Key data is uint32.
            jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype)).size
            * 4
        )
    return np.dtype(dtype).itemsize


def array_bytes(shape: Sequence[int], dtype: Any) -> int:
    """Bytes of an array on a device, which packs two int4 into a byte."""
    size = math.prod(shape)
    return -(-size // 2) if dtype == jnp.int4 else size * dtype_bytes(dtype)


def pad(x: jax.Array, row: ArrayPlan) -> jax.Array:
    """Appends zeros to an array of `row.shape`, up to `row.stored_shape`."""
    if row.shape == row.stored_shape:
        return x
    widths = [(0, s - n) for n, s in zip(row.shape, row.stored_shape, strict=True)]
    return jnp.pad(x, widths)


def unpad(x: jax.Array, row: ArrayPlan) -> jax.Array:
    """Slices an array of `row.stored_shape` to `row.shape`."""
    return x if row.shape == row.stored_shape else x[tuple(map(slice, row.shape))]


def pad_tree(tree: Any, rows: Any) -> Any:
    """Applies `pad` to each array of a tree and its plan in `rows`."""
    return jax.tree.map(pad, tree, rows)


def unpad_tree(tree: Any, rows: Any) -> Any:
    """Applies `unpad` to each array of a tree and its plan in `rows`."""
    return jax.tree.map(unpad, tree, rows)


def constrain(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Constrains an array inside a program to a sharding of the run."""
    # Inside `shard_map` only a bare spec is legal; it names the Auto axes alone.
    is_mapped = jax.sharding.get_abstract_mesh().manual_axes
    return jax.lax.with_sharding_constraint(x, sharding.spec if is_mapped else sharding)


def place_tree(tree: Any, rows: Any) -> Any:
    """Constrains unpadded arrays inside a program to the stored sharding."""

    def place(x: jax.Array, row: ArrayPlan) -> jax.Array:
        # Only padded arrays divide evenly over the devices.
        stored = constrain(pad(x, row), row.stored)
        return unpad(stored, row)

    return jax.tree.map(place, tree, rows)


def use_tree(tree: Any, rows: Any) -> Any:
    """Constrains arrays inside a program to the sharding in which they are used."""
    return jax.tree.map(lambda x, row: constrain(x, row.used), tree, rows)


def shardings(rows: Any) -> Any:
    """Shardings of stored arrays, as `jit` takes them, of a tree of `ArrayPlan`."""
    return jax.tree.map(lambda row: row.stored, rows)


def abstract_tree(rows: Any) -> Any:
    """Abstract stored arrays with shardings, of a tree of `ArrayPlan`."""
    return jax.tree.map(lambda row: row.abstract, rows)
