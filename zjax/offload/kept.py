"""What the forward pass of a block leaves to a backward pass that is another program.

A pull-back of `jax.vjp` is a tree of arrays. Those that both programs are given, as the
parameters, are not kept; the others leave the one and enter the other, which builds the
same tree and puts them in: what it computed for them falls away.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.core as jax_core

Pull = TypeVar("Pull", bound=Callable[..., Any])


def kept_of(pull: Any, given: Any) -> list[jax.Array]:
    """What a pull-back holds besides constants and arrays that are given.

    Args:
        pull: Of `jax.vjp`, within a program.
        given: A tree of operands of the function.

    Returns:
        Each array once.
    """
    known = set(map(id, jax.tree.leaves(given)))
    held = [x for x in jax.tree.leaves(pull) if isinstance(x, jax_core.Tracer)]
    return list({id(x): x for x in held if id(x) not in known}.values())


def pull_with(kept: Sequence[jax.Array], pull: Pull, given: Any) -> Pull:
    """The same pull-back, of arrays that another program kept.

    Args:
        kept: As `kept_of` gave them, of the same function and of other operands.
        pull: Of `jax.vjp`.
        given: As there.

    Returns:
        A pull-back of those other operands.

    Example:
        >>> x, y, nothing = map(jax.numpy.float32, (3, 2, 0))
        >>> def there(x, y):
        ...     return kept_of(jax.vjp(lambda x: jax.numpy.sin(x) * y, x)[1], y)
        >>> def back(kept, y, x):
        ...     _, pull = jax.vjp(lambda x: jax.numpy.sin(x) * y, x)
        ...     return pull_with(kept, pull, y)(y / y)
        >>> (found,) = jax.jit(back)(jax.jit(there)(x, y), y, nothing)
        >>> bool(found == y * jax.numpy.cos(x))
        True
    """
    pairs = list(zip(kept_of(pull, given), kept, strict=True))
    assert all((x.shape, x.dtype) == (y.shape, y.dtype) for x, y in pairs)
    others = {id(x): y for x, y in pairs}
    return jax.tree.map(lambda x: others.get(id(x), x), pull)
