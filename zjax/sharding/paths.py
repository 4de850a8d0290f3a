"""Key paths of arrays: as text, by layer, and from optimizer state to parameters."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax


class LayerKey(jax.tree_util.DictKey):
    """Key of one layer of `Layers`.

    A `LayerKey` equals the key of the stacked array, so that rules that match names
    find the layer. The key adds nothing to a path: a layer has the path of the stack.

    Args:
        name: Name of the stacked array.
        layer: Index of the layer.
    """

    def __init__(self, name: str, layer: int):
        super().__init__(name)
        self.layer = layer


def path_of(keys: Any) -> str:
    """Formats a key path of `jax.tree_util` as text with `/` between the parts.

    Example:
        >>> path_of((jax.tree_util.DictKey("blocks"), jax.tree_util.SequenceKey(0)))
        'blocks/0'
    """
    keys = tuple(key for key in keys if not isinstance(key, LayerKey))
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def layer_of(keys: Any) -> int | None:
    """Index of the layer in a key path; None without a `LayerKey`.

    Example:
        >>> layer_of((jax.tree_util.DictKey("blocks"), LayerKey("kernel", 3)))
        3
    """
    numbers = (key.layer for key in keys if isinstance(key, LayerKey))
    return next(numbers, None)


def name_of(path: str) -> str:
    """Last part of a path, which is the name of an array.

    Example:
        >>> name_of("blocks/mlp/bias")
        'bias'
    """
    return path.rsplit("/", 1)[-1]


def owners(keys: Any, params: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the parameters that a leaf of optimizer state may belong to.

    `params` holds any value per path. The path of the leaf contains the path of each
    owner: paths that end last come first, longer paths before shorter paths.

    Example:
        >>> keys = map(jax.tree_util.DictKey, ("mu", "blocks", "kernel"))
        >>> list(owners(tuple(keys), {"kernel": 1, "blocks/kernel": 2, "bias": 3}))
        [2, 1]
    """
    names = [path_of((key,)) for key in keys]
    # State nests the tree of parameters under names such as `mu`: paths end alike.
    for end in range(len(names), -1, -1):
        for start in range(end + 1):
            path = "/".join(names[start:end])
            if path in params:
                yield params[path]


def position_finder(params: Any) -> Callable[[Any], int | None]:
    """Makes a function from the key path of optimizer state to the parameter's index.

    Example:
        >>> position = position_finder({"bias": 0, "kernel": 0})
        >>> position((jax.tree_util.DictKey("mu"), jax.tree_util.DictKey("kernel")))
        1
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    names = [(path_of(keys), layer_of(keys)) for keys, _ in leaves]
    positions = {name: i for i, name in enumerate(names)}
    # `owners` yields values, and here needs paths, which the layers of a stack share.
    paths = {path: path for path, _ in names}

    def position(keys: Any) -> int | None:
        keys_of_owners = ((path, layer_of(keys)) for path in owners(keys, paths))
        return next((positions[x] for x in keys_of_owners if x in positions), None)

    return position
