"""What Flax says of the placement of arrays: read as names, and never acted upon.

Flax turns such names into constraints wherever a mesh is set, also while it checks the
shapes of parameters. Here the plan places parameters, and the names mean dims.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from jax.sharding import NamedSharding

_only_read = contextvars.ContextVar("only_read", default=False)


@contextlib.contextmanager
def names_only() -> Iterator[None]:
    """Has Flax take metadata for names while the code of a user runs.

    Example:
        >>> with names_only():
        ...     nn.Partitioned(1.0, ("a dim",)).unbox()
        1.0
    """
    token = _only_read.set(True)
    try:
        with nnx.use_eager_sharding(False):
            yield
    finally:
        _only_read.reset(token)


def _as_names(unbox: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(unbox)
    def read(self: Any, apply_constraint: bool = True) -> Any:
        return unbox(self, apply_constraint and not _only_read.get())

    return read


# Flax has no switch for it, as it has in NNX. Outside of `names_only` nothing changes.
for _box in (nn.Partitioned, nn.LogicallyPartitioned):
    _box.unbox = _as_names(_box.unbox)


def is_box(x: Any) -> bool:
    """Whether Flax wraps an array in metadata."""
    return isinstance(x, nn.meta.AxisMetadata)


def names_of_boxes(tree: Any, *, boxed: bool = False) -> Any:
    """Collects the names of dims of a tree of arrays of Linen.

    Args:
        tree: Arrays, some of them in boxes.
        boxed: Whether the names are to be in the same boxes, as where the boxes stay.

    Returns:
        A tuple of names for each box that has some, and None for each other array.
    """

    def names(x: Any) -> Any:
        found = tuple(x.names) if isinstance(x, nn.Partitioned) else None
        return x.replace_boxed(found) if boxed and is_box(x) else found

    return jax.tree.map(names, tree, is_leaf=is_box)


def names_of_sharding(given: Any) -> tuple[Any, ...]:
    """Reads the names of dims that a variable of NNX has as its sharding.

    Args:
        given: Names, a PartitionSpec or a NamedSharding; None for no names.

    Returns:
        What is said of each dim, from the first on.

    Example:
        >>> names_of_sharding(jax.P("embed", None))
        ('embed', None)
    """
    return tuple((given.spec if isinstance(given, NamedSharding) else given) or ())
