"""What the forward pass of a block leaves to a backward pass that is another program.

A pull-back of `jax.vjp` is a tree of arrays. Those that both programs are given, as the
parameters, are not kept; the others leave the one and enter the other, which builds the
same tree and puts them in: what it computed for them falls away.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

Pull = TypeVar("Pull", bound=Callable[..., Any])


def kept_of(pull: Any, given: Any) -> list[jax.Array]:
    """What a pull-back holds besides arrays that are given.

    Args:
        pull: Of `jax.vjp`, within a program.
        given: A tree of operands of the function.

    Returns:
        Each array once.
    """
    known = set(map(id, jax.tree.leaves(given)))
    others = {id(x): x for x in jax.tree.leaves(pull) if id(x) not in known}
    return list(others.values())


def pull_with(kept: Sequence[jax.Array], pull: Pull, given: Any) -> Pull:
    """The same pull-back, of arrays that another program kept.

    Args:
        kept: As `kept_of` gave them, of the same function and of other operands.
        pull: Of `jax.vjp`.
        given: As there.

    Returns:
        A pull-back of those other operands.

    Example:
        >>> def there(x, y):
        ...     z, pull = jax.vjp(lambda x: jax.numpy.sin(x) * y, x)
        ...     return z, kept_of(pull, y)
        >>> def back(kept, y):
        ...     _, pull = jax.vjp(lambda x: jax.numpy.sin(x) * y, 0.0)
        ...     return pull_with(kept, pull, y)(1.0)
        >>> _, kept = jax.jit(there)(3.0, 2.0)
        >>> bool(jax.jit(back)(kept, 2.0)[0] == 2 * jax.numpy.cos(3.0))
        True
    """
    pairs = list(zip(kept_of(pull, given), kept, strict=True))
    assert all((x.shape, x.dtype) == (y.shape, y.dtype) for x, y in pairs)
    others = {id(x): y for x, y in pairs}
    return jax.tree.map(lambda x: others.get(id(x), x), pull)
