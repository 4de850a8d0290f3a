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
import optax

from zjax.config.schema import Optimizer


@dataclasses.dataclass(frozen=True)
class AdamSteps:
    """Steps in units of the learning rate, within the bounds of Adam's.

    Args:
        b1: Decay of the momentum, 0 or more and less than 1; traced where it cycles.
        b2: Decay of the second moments, 0 or more and less than 1.
        eps: Added to the root of the second moments, above 0.
        corrects_bias: Whether moments are divided by their sums of weights, which are
            below 1 in early steps. Without it a step by kept second moments is
            `1 / sqrt(1 - b2**updates)` times as large.

    Example:
        >>> steps = AdamSteps(0.0, 0.75, 1e-8)
        >>> momentum, second = jnp.array([2.0, 9.0, 1.0]), jnp.array([4.0, 4.0, 0.0])
        >>> found = steps.of_momentum(momentum, second, 1, 1)
        >>> found.tolist()
        [0.5, 2.0, 0.0]
        >>> steps.momentum_of(found, second, 1, 1).tolist()
        [2.0, 8.0, 0.0]
        >>> raw = dataclasses.replace(steps, corrects_bias=False)
        >>> raw.unbounded(momentum, second, 1, 1).tolist()
        [1.0, 4.5, 0.0]

    Reference:
        Kingma and Ba, Adam (arXiv:1412.6980), section 2.1: the bounds.
    """

    b1: Any
    b2: float
    eps: float
    corrects_bias: bool = True

    @property
    def bound(self) -> float:
        """The largest step by corrected moments."""
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
        # Raw second moments are too small, so that every step is larger: the scaled
        # bound clips the same elements with and without the correction.
        bound = self.bound / jnp.sqrt(self._weight_of_second(updates))
        return jax.tree.map(lambda u: jnp.clip(u, -bound, bound), steps)

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
        if not self.corrects_bias:
            return jnp.sqrt(second) + self.eps
        corrected = second / (1 - self.b2 ** jnp.float32(updates))
        return (1 - self.b1 ** jnp.float32(first)) * (jnp.sqrt(corrected) + self.eps)

    def _weight_of_second(self, updates: Any) -> Any:
        """Returns how much too small the second moments are that divide momenta."""
        return 1.0 if self.corrects_bias else 1 - self.b2 ** jnp.float32(updates)


def make_adam_steps(settings: Optimizer) -> AdamSteps:
    """Builds the steps of an optimizer with Adam's moments.

    Args:
        settings: Reads `b1`, `b2`, `eps` and `bias_correction`.

    Example:
        >>> make_adam_steps(Optimizer(bias_correction=False)).corrects_bias
        False
    """
    return AdamSteps(settings.b1, settings.b2, settings.eps, settings.bias_correction)


def scale_by_adam(steps: AdamSteps) -> optax.GradientTransformation:
    """Scales gradients to Adam's steps, with or without the bias correction.

    Args:
        steps: Decays of the moments; `b1` may be traced.

    Returns:
        A transformation with the state of `optax.scale_by_adam`.

    Example:
        >>> tx = scale_by_adam(AdamSteps(0.5, 0.75, 1e-8, corrects_bias=False))
        >>> grads = jnp.array([4.0, 0.0])
        >>> tx.update(grads, tx.init(grads))[0].tolist()
        [1.0, 0.0]

    Reference:
        Kingma and Ba, Adam (arXiv:1412.6980), section 3: the bias correction.
    """
    adam = optax.scale_by_adam(steps.b1, steps.b2, steps.eps)
    if steps.corrects_bias:
        return adam

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        _, state = adam.update(updates, state, params)
        count = state.count
        return steps.unbounded(state.mu, state.nu, count, count), state

    return optax.GradientTransformation(adam.init, update)


def where_known(tree: Any, second: Any) -> Any:
    """A tree with 0 for elements without second moments, as one bit cannot say 0.

    Example:
        >>> where_known(jnp.array([2.0, 3.0]), jnp.array([0.5, 0.0])).tolist()
        [2.0, 0.0]
    """
    return jax.tree.map(lambda x, v: jnp.where(v > 0, x, 0), tree, second)
