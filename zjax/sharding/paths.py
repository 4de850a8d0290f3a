"""Paths of arrays in their trees: as text, by layer, and those of one parameter."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax


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
