"""Arrays that stack equal layers: stored as one, used layer by layer.

A stacked array has its layers along the first dim. One array in place of many keeps the
update of the optimizer a small program; layers of their own let each be gathered when
it is due, and its gradient be sent as soon as it is there.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zjax.errors import ModelError, Problem
from zjax.sharding.paths import LayerKey, name_of, path_of
from zjax.sharding.placement import ArrayPlan
from zjax.typing import Params


@jax.tree_util.register_pytree_with_keys_class
class Layers(tuple[Any, ...]):
    """What one array would stack, as a branch of a tree with one leaf per layer.

    Args:
        layers: One each, in order.
        name: Of the array: the last key in the path of every layer, so that rules that
            go by names find it.

    Example:
        >>> jax.tree.map(lambda x: 2 * x, Layers((1, 2)))
        (2, 4)
    """

    name: str

    def __new__(cls, layers: Iterable[Any], name: str = "") -> "Layers":
        """Makes a tuple that knows its name."""
        self = super().__new__(cls, layers)
        self.name = name
        return self

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], str]:
        """Gives JAX the layers."""
        return [
            (LayerKey(self.name, i), layer) for i, layer in enumerate(self)
        ], self.name

    def tree_flatten(self) -> tuple[tuple[Any, ...], str]:
        """The same where no path is asked for."""
        return tuple(self), self.name

    @classmethod
    def tree_unflatten(cls, name: str, layers: Iterable[Any]) -> "Layers":
        """Takes them back."""
        return cls(layers, name)


def take_apart(params: Params, rows: Any) -> Params:
    """Slices stacked arrays.

    Args:
        params: Arrays, or shards of them by hand; what is apart stays so.
        rows: Their rows in a plan in use, or any tree with `Layers` where they go.

    Returns:
        The tree with `Layers` where the rows have them.
    """

    def one(row: Any, x: Any) -> Any:
        if not _is_apart(row) or _is_apart(x):
            return x
        return Layers((_layer(x, i) for i in range(len(row))), row.name)

    return jax.tree.map(one, rows, params, is_leaf=_is_apart)


def put_together(params: Params) -> Params:
    """The inverse of `take_apart`.

    Args:
        params: A tree with `Layers`.

    Returns:
        The tree with stacked arrays, in memory: an update that also stacked would write
        each of its results in a pass of its own.

    Example:
        >>> put_together({"scale": Layers((jnp.ones(2), jnp.zeros(2)))})["scale"].shape
        (2, 2)
    """

    def stack(*rows: jax.Array) -> jax.Array:
        return jax.lax.optimization_barrier(jnp.stack(rows))

    def one(x: Any) -> Any:
        return jax.tree.map(stack, *x) if _is_apart(x) else x

    return jax.tree.map(one, params, is_leaf=_is_apart)


def layer_by_layer(row: ArrayPlan) -> Any:
    """The plans of the layers of a stack.

    Args:
        row: The plan of any array.

    Returns:
        `Layers` of one plan each; `row` itself where it is of no stack.
    """
    if not row.num_layers:
        return row
    return Layers([row.layer] * row.num_layers, name_of(row.path))


def layers_of(params: Params, num_layers: int) -> list[Params]:
    """One tree per layer.

    Args:
        params: Stacked arrays, or `Layers`; the first dim of each is the layers'.
        num_layers: How many there are.

    Returns:
        Trees of the same structure.

    Raises:
        ModelError: Arrays of another number of layers.

    Example:
        >>> [layer["w"].item() for layer in layers_of({"w": jnp.arange(2)}, 2)]
        [0, 1]
    """
    whole = jax.tree.map(
        lambda x: x if _is_apart(x) else _slices(x), params, is_leaf=_is_apart
    )
    depths = {len(x) for x in jax.tree.leaves(whole, is_leaf=_is_apart)}
    if depths - {num_layers}:
        problem = f"are not the {num_layers} of the model"
        remedy = "use the model that these parameters were made for"
        raise ModelError(Problem("layers", max(depths), problem, remedy))

    def layer(number: int) -> Params:
        return jax.tree.map(lambda x: x[number], whole, is_leaf=_is_apart)

    return [layer(number) for number in range(num_layers)]


def side_by_side(layers: Sequence[Params]) -> Params:
    """The inverse of `layers_of`.

    Args:
        layers: Trees of the same structure, one per layer.

    Returns:
        One tree with `Layers` where an array would stack theirs.

    Example:
        >>> side_by_side([{"w": 1}, {"w": 2}])
        {'w': (1, 2)}
    """

    def one(keys: Any, *leaves: Any) -> Layers:
        return Layers(leaves, name_of(path_of(keys)))

    return jax.tree_util.tree_map_with_path(one, *layers)


@jax.custom_vjp
def _slices(x: jax.Array) -> Layers:
    return Layers(x[i] for i in range(x.shape[0]))


# Left to itself each slice would become an array of the size of the stack.
_slices.defvjp(lambda x: (_slices(x), None), lambda _, grads: (jnp.stack(grads),))


def _layer(stacked: Any, number: int) -> Any:
    return jax.tree.map(lambda x: x[number], stacked)


def _is_apart(x: Any) -> bool:
    return isinstance(x, Layers)
