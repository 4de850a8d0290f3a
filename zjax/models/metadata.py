"""Flax's sharding metadata, read as names of dims and otherwise ignored.

Flax turns it into sharding constraints wherever a mesh is set, even while it checks the
shapes of parameters. In zjax the plan places parameters.
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
    """Keeps Flax from applying sharding metadata while user code runs.

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


# Linen has no switch for this. Outside `names_only` nothing changes.
for _box in (nn.Partitioned, nn.LogicallyPartitioned):
    _box.unbox = _as_names(_box.unbox)


def is_box(x: Any) -> bool:
    """Whether a value is an array boxed with metadata."""
    return isinstance(x, nn.meta.AxisMetadata)


def names_of_boxes(tree: Any, *, boxed: bool = False) -> Any:
    """Names of dims of Linen arrays: a tuple per named box, None per other leaf.

    Args:
        tree: Arrays, some of them boxed.
        boxed: Whether to return the names in the same boxes.
    """

    def names(x: Any) -> Any:
        dim_names = tuple(x.names) if isinstance(x, nn.Partitioned) else None
        return x.replace_boxed(dim_names) if boxed and is_box(x) else dim_names

    return jax.tree.map(names, tree, is_leaf=is_box)


def names_of_sharding(sharding: Any) -> tuple[Any, ...]:
    """Names of dims in the sharding of an NNX variable.

    Args:
        sharding: Names, a PartitionSpec, a NamedSharding, or None without names.

    Example:
        >>> names_of_sharding(jax.P("embed", None))
        ('embed', None)
    """
    return tuple(
        (sharding.spec if isinstance(sharding, NamedSharding) else sharding) or ()
    )
