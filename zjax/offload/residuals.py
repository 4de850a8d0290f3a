"""Residuals of a `jax.vjp` whose forward and backward passes are two programs.

The function that `jax.vjp` returns is a tree of arrays. Those that both programs are
given, such as parameters, need not be saved. The others leave the forward program and
enter the backward program, which builds the same tree and replaces its arrays by them:
XLA then drops what computed the replaced ones.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.core as jax_core

Pull = TypeVar("Pull", bound=Callable[..., Any])


def residuals_of(pull: Any, given: Any) -> list[jax.Array]:
    """The arrays of a `jax.vjp` function that a backward program has to be handed.

    Args:
        pull: Function that `jax.vjp` returned, while tracing.
        given: A tree of operands that the backward program has anyway.

    Returns:
        Each array once.
    """
    known = set(map(id, jax.tree.leaves(given)))
    held = [x for x in jax.tree.leaves(pull) if isinstance(x, jax_core.Tracer)]
    return list({id(x): x for x in held if id(x) not in known}.values())


def vjp_with(residuals: Sequence[jax.Array], pull: Pull, given: Any) -> Pull:
    """A `jax.vjp` function with the residuals of another program.

    Args:
        residuals: Result of `residuals_of` in the other program.
        pull: Function that `jax.vjp` returned for the same function of other operands.
        given: As in the other program.

    Returns:
        A function that differentiates at the operands of the other program.

    Example:
        >>> x, y, nothing = map(jax.numpy.float32, (3, 2, 0))
        >>> def forward(x, y):
        ...     return residuals_of(jax.vjp(lambda x: jax.numpy.sin(x) * y, x)[1], y)
        >>> def backward(residuals, y, x):
        ...     _, pull = jax.vjp(lambda x: jax.numpy.sin(x) * y, x)
        ...     return vjp_with(residuals, pull, y)(y / y)
        >>> (found,) = jax.jit(backward)(jax.jit(forward)(x, y), y, nothing)
        >>> bool(found == y * jax.numpy.cos(x))
        True
    """
    pairs = list(zip(residuals_of(pull, given), residuals, strict=True))
    assert all((x.shape, x.dtype) == (y.shape, y.dtype) for x, y in pairs)
    others = {id(x): y for x, y in pairs}
    return jax.tree.map(lambda x: others.get(id(x), x), pull)
