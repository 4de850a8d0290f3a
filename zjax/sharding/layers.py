"""Arrays that stack equal layers: stored as one array, used layer by layer.

Layers are stacked along the first dim. Stacking keeps the program of the optimizer
update small. Separate layers let each layer be gathered just before use, and each
gradient be reduced as soon as it is computed.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zjax.errors import ModelError, Problem
from zjax.sharding.naming import LayerKey, name_of, path_of
from zjax.sharding.placement import ArrayPlan
from zjax.typing import Params


@jax.tree_util.register_pytree_with_keys_class
class Layers(tuple[Any, ...]):
    """The layers of a stacked array, as a node of a tree with one leaf per layer.

    Args:
        name: Name of the stacked array, the last key in the path of every layer; rules
            that match names find the layers by it.
    """

    name: str

    def __new__(cls, layers: Iterable[Any], name: str = "") -> "Layers":
        """Makes a tuple that carries the name of the stacked array."""
        self = super().__new__(cls, layers)
        self.name = name
        return self

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], str]:
        """Flattens for JAX into layers with keys, and the name."""
        return [
            (LayerKey(self.name, i), layer) for i, layer in enumerate(self)
        ], self.name

    def tree_flatten(self) -> tuple[tuple[Any, ...], str]:
        """Flattens for JAX without keys."""
        # Apart from keys, as a plain flatten would else make the key of every layer.
        return tuple(self), self.name

    @classmethod
    def tree_unflatten(cls, name: str, layers: Iterable[Any]) -> "Layers":
        """Unflattens for JAX."""
        return cls(layers, name)


def take_apart(params: Params, rows: Any) -> Params:
    """Slices stacked arrays into `Layers` where the tree `rows` has `Layers`."""

    def slice_stack(row: Any, x: Any) -> Any:
        if not is_layers(row) or is_layers(x):
            return x
        return Layers((_layer(x, i) for i in range(len(row))), row.name)

    return jax.tree.map(slice_stack, rows, params, is_leaf=is_layers)


def put_together(params: Params) -> Params:
    """Stacks `Layers` into arrays, the inverse of `take_apart`."""

    def stack(*rows: jax.Array) -> jax.Array:
        # Else XLA fuses the stacking into the optimizer update, in one pass per result.
        return jax.lax.optimization_barrier(jnp.stack(rows))

    def stack_layers(x: Any) -> Any:
        return jax.tree.map(stack, *x) if is_layers(x) else x

    return jax.tree.map(stack_layers, params, is_leaf=is_layers)


def layer_by_layer(row: ArrayPlan) -> Any:
    """Returns `Layers` with the plan of each layer of a stack, else `row` itself."""
    if not row.num_layers:
        return row
    return Layers([row.layer] * row.num_layers, name_of(row.path))


def layers_of(params: Params, num_layers: int) -> list[Params]:
    """Splits a tree of stacked arrays or `Layers` into one tree per layer."""
    unstacked = jax.tree.map(
        lambda x: x if is_layers(x) else _slices(x), params, is_leaf=is_layers
    )
    depths = {len(x) for x in jax.tree.leaves(unstacked, is_leaf=is_layers)}
    if depths - {num_layers}:
        problem = f"are not the {num_layers} of the model"
        remedy = "use the model that these parameters were made for"
        raise ModelError(Problem("layers", max(depths), problem, remedy))

    def layer(number: int) -> Params:
        return jax.tree.map(lambda x: x[number], unstacked, is_leaf=is_layers)

    return [layer(number) for number in range(num_layers)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerOf:
    """One layer, held as a group of layers and an index, and sliced where it is read.

    The backward pass of a loop saves the inputs of a recomputed block. A group is saved
    as the array that the loop runs over; a slice would be saved as a copy of all
    layers.
    """

    group: Params
    number: int = dataclasses.field(metadata={"static": True})


def read_layer(params: Params) -> Params:
    """Slices a layer out of a `LayerOf`; any other tree is returned unchanged."""
    if not isinstance(params, LayerOf):
        return params
    return _layer(params.group, params.number)


def cut_layers(params: Params, sizes: Sequence[int]) -> list[Params]:
    """Splits stacked arrays or `Layers` into ranges of `sizes` adjacent layers.

    Example:
        >>> [x["w"].tolist() for x in cut_layers({"w": jnp.arange(3)}, (1, 2))]
        [[0], [1, 2]]
    """
    if len(sizes) == 1:
        return [params]
    firsts = [*itertools.accumulate(sizes, initial=0)]

    def cut(x: Any) -> Sequence[Any]:
        if not is_layers(x):
            return _ranges(x, tuple(firsts))
        return [Layers(x[i:j], x.name) for i, j in itertools.pairwise(firsts)]

    ranges = jax.tree.map(cut, params, is_leaf=is_layers)
    outer = jax.tree.structure(params, is_leaf=is_layers)
    leaves = outer.flatten_up_to(ranges)
    return [outer.unflatten([x[i] for x in leaves]) for i in range(len(sizes))]


def side_by_side(layers: Sequence[Params]) -> Params:
    """Joins one tree per layer into a tree of `Layers`, the inverse of `layers_of`."""

    def join(keys: Any, *leaves: Any) -> Layers:
        return Layers(leaves, name_of(path_of(keys)))

    return jax.tree_util.tree_map_with_path(join, *layers)


@jax.custom_vjp
def _slices(x: jax.Array) -> Layers:
    """Slices an array into `Layers`, with a gradient that stacks."""
    return Layers(x[i] for i in range(x.shape[0]))


# The default transpose pads the gradient of each slice to the size of the stack.
_slices.defvjp(lambda x: (_slices(x), None), lambda _, grads: (jnp.stack(grads),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _ranges(x: jax.Array, firsts: tuple[int, ...]) -> list[jax.Array]:
    """Slices an array at `firsts`, with a gradient that concatenates."""
    return [x[i:j] for i, j in itertools.pairwise(firsts)]


# As for `_slices`: no padding to the size of the stack.
_ranges.defvjp(
    lambda x, firsts: (_ranges(x, firsts), None),
    lambda firsts, _, grads: (jnp.concatenate(grads),),
)


def _layer(stacked: Any, number: int) -> Any:
    return jax.tree.map(lambda x: x[number], stacked)


def is_layers(x: Any) -> bool:
    """Whether a node of a tree is `Layers`."""
    return isinstance(x, Layers)
