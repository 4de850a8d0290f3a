"""Steps of Adam by second moments that are kept.

Adam's own steps are bounded, as a large gradient also enters the second moments. Kept
ones know nothing of gradients that come later, like those of a token that was rare
until then, and bound nothing by themselves.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class AdamSteps:
    """Steps in units of the learning rate, within the bounds of Adam's.

    Args:
        b1: Decay of the momentum, 0 or more and less than 1.
        b2: Decay of the second moments, 0 or more and less than 1.
        eps: Added to the root of the second moments, above 0.

    Example:
        >>> steps = AdamSteps(0.0, 0.75, 1e-8)
        >>> momentum, second = jnp.array([2.0, 9.0, 1.0]), jnp.array([4.0, 4.0, 0.0])
        >>> found = steps.of_momentum(momentum, second, 1, 1)
        >>> found.tolist()
        [0.5, 2.0, 0.0]
        >>> steps.momentum_of(found, second, 1, 1).tolist()
        [2.0, 8.0, 0.0]

    Reference:
        Kingma and Ba, Adam (arXiv:1412.6980), section 2.1: the bounds.
    """

    b1: float
    b2: float
    eps: float

    @property
    def bound(self) -> float:
        """The largest step."""
        return max(1.0, (1 - self.b1) / math.sqrt(1 - self.b2))

    def of_momentum(self, momentum: Any, second: Any, first: Any, updates: Any) -> Any:
        """Steps of a tree of momenta; 0 where there are no second moments.

        Args:
            momentum: Momenta, not corrected for their bias.
            second: Second moments that are kept, not corrected either.
            first: Updates of the momentum, 1 or more.
            updates: Updates of the second moments, 1 or more.
        """
        steps = self.unbounded(momentum, second, first, updates)
        return jax.tree.map(lambda u: jnp.clip(u, -self.bound, self.bound), steps)

    def unbounded(self, momentum: Any, second: Any, first: Any, updates: Any) -> Any:
        """The same by second moments that know all gradients."""
        return jax.tree.map(
            lambda m, v: jnp.where(v > 0, m / self._size(v, first, updates), 0),
            momentum,
            second,
        )

    def momentum_of(self, steps: Any, second: Any, first: Any, updates: Any) -> Any:
        """The momenta of such steps, with the arguments of `of_momentum`."""
        return jax.tree.map(
            lambda u, v: jnp.where(v > 0, u * self._size(v, first, updates), 0),
            steps,
            second,
        )

    def _size(self, second: jax.Array, first: Any, updates: Any) -> jax.Array:
        corrected = second / (1 - self.b2 ** jnp.float32(updates))
        return (1 - self.b1 ** jnp.float32(first)) * (jnp.sqrt(corrected) + self.eps)


def where_known(tree: Any, second: Any) -> Any:
    """A tree with 0 for elements without second moments, as one bit cannot say 0.

    Example:
        >>> where_known(jnp.array([2.0, 3.0]), jnp.array([0.5, 0.0])).tolist()
        [2.0, 0.0]
    """
    return jax.tree.map(lambda x, v: jnp.where(v > 0, x, 0), tree, second)
