"""Residuals of a `jax.vjp` whose forward and backward passes are two programs.

The function that `jax.vjp` returns is a tree of arrays. The forward program returns
these arrays as residuals, except operands of both programs, such as parameters. The
backward program traces the same `jax.vjp` and replaces its arrays by the residuals;
XLA then removes the computation of the replaced arrays as dead code.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.core as jax_core

Pull = TypeVar("Pull", bound=Callable[..., Any])


def residuals_of(pull: Any, operands: Any) -> list[jax.Array]:
    """The arrays of a `jax.vjp` function that the forward program has to save.

    Args:
        pull: Function that `jax.vjp` returned, while tracing.
        operands: Tree of arrays that the backward program gets, too.

    Returns:
        Distinct arrays.
    """
    known = set(map(id, jax.tree.leaves(operands)))
    traced = [x for x in jax.tree.leaves(pull) if isinstance(x, jax_core.Tracer)]
    return list({id(x): x for x in traced if id(x) not in known}.values())


def vjp_with(residuals: Sequence[jax.Array], pull: Pull, operands: Any) -> Pull:
    """Puts the residuals of a forward program into a `jax.vjp` function.

    Args:
        residuals: Result of `residuals_of` in the forward program.
        pull: Function that `jax.vjp` returned for the same function, while tracing the
            backward program.
        operands: Tree of arrays as for `residuals_of`.

    Returns:
        A function that differentiates at the inputs of the forward program.

    Example:
        >>> x, y, nothing = map(jax.numpy.float32, (3, 2, 0))
        >>> def forward(x, y):
        ...     return residuals_of(jax.vjp(lambda x: jax.numpy.sin(x) * y, x)[1], y)
        >>> def backward(residuals, y, x):
        ...     _, pull = jax.vjp(lambda x: jax.numpy.sin(x) * y, x)
        ...     return vjp_with(residuals, pull, y)(y / y)
        >>> (grad,) = jax.jit(backward)(jax.jit(forward)(x, y), y, nothing)
        >>> bool(grad == y * jax.numpy.cos(x))
        True
    """
    pairs = list(zip(residuals_of(pull, operands), residuals, strict=True))
    assert all((x.shape, x.dtype) == (y.shape, y.dtype) for x, y in pairs)
    saved = {id(x): y for x, y in pairs}
    return jax.tree.map(lambda x: saved.get(id(x), x), pull)
