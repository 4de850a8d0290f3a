"""Adam, 1-bit Adam and 1-bit LAMB; 1-bit replicas exchange one bit per number.

Replicas send steps, not momenta: in units of the step a bit loses as much of one
parameter as of another. The reference implementation of 1-bit Adam has no bias
correction, sends the momentum and does not bound the steps, which takes a long warm-up.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zjax.optim.transforms import layer_norm, ratio_of_norms
from zjax.schedule.exchange import COMPRESSED, WARM_UP
from zjax.settings.schema import AdamMoments, Corrected


@dataclasses.dataclass(frozen=True)
class AdamSteps:
    """Computes Adam's steps in units of the learning rate, and bounds on these steps.

    Adam's steps are bounded, as a large gradient also enters the second moments. Frozen
    second moments know nothing of later gradients, say of a token that was rare before,
    and need an explicit bound.

    Args:
        b1: Decay of the momentum, 0 or more and less than 1; traced if it cycles.
        b2: Decay of the second moments, 0 or more and less than 1.
        eps: Term added to the root of the second moments, above 0.
        corrects_bias: Whether moments are divided by the sums of past weights, which
            are below 1 in early steps. Without it, a step by frozen second moments is
            `1 / sqrt(1 - b2**updates)` times as large.

    Reference:
        Kingma and Ba, Adam (arXiv:1412.6980), section 2.1: the bounds.
    """

    b1: Any
    b2: float
    eps: float
    corrects_bias: bool = True

    @property
    def bound(self) -> float:
        """The largest step that Adam takes with corrected moments."""
        return max(1.0, (1 - self.b1) / math.sqrt(1 - self.b2))

    def of_momentum(self, momentum: Any, second: Any, first: Any, updates: Any) -> Any:
        """Converts a tree of raw momenta to clipped steps; 0 for a second moment of 0.

        `second` holds raw, possibly frozen second moments. `first` and `updates`, 1 or
        more, count the updates of the momentum and of the second moments.
        """
        steps = self.unbounded(momentum, second, first, updates)
        # Raw second moments are too small, so that every step is larger: the scaled
        # bound clips the same elements with and without the correction.
        bound = self.bound / jnp.sqrt(self._weight_of_second(updates))
        return jax.tree.map(lambda u: jnp.clip(u, -bound, bound), steps)

    def unbounded(self, momentum: Any, second: Any, first: Any, updates: Any) -> Any:
        """Converts momenta to steps unclipped, for `second` up to date."""
        return jax.tree.map(
            lambda m, v: jnp.where(v > 0, m / self._size(v, first, updates), 0),
            momentum,
            second,
        )

    def momentum_of(self, steps: Any, second: Any, first: Any, updates: Any) -> Any:
        """Inverts `of_momentum`: converts steps back to raw momenta."""
        return jax.tree.map(
            lambda u, v: jnp.where(v > 0, u * self._size(v, first, updates), 0),
            steps,
            second,
        )

    def _size(self, second: jax.Array, first: Any, updates: Any) -> jax.Array:
        """Returns the divisor that turns a raw momentum into a step."""
        if not self.corrects_bias:
            return jnp.sqrt(second) + self.eps
        corrected = second / (1 - self.b2 ** jnp.float32(updates))
        return (1 - self.b1 ** jnp.float32(first)) * (jnp.sqrt(corrected) + self.eps)

    def _weight_of_second(self, updates: Any) -> Any:
        """Returns the factor by which raw second moments are too small."""
        return 1.0 if self.corrects_bias else 1 - self.b2 ** jnp.float32(updates)


def make_adam_steps(rule: AdamMoments) -> AdamSteps:
    """Builds `AdamSteps` from the moment settings of an update rule."""
    corrects_bias = not isinstance(rule, Corrected) or rule.bias_correction
    return AdamSteps(rule.b1, rule.b2, rule.eps, corrects_bias)


def scale_by_adam(steps: AdamSteps) -> optax.GradientTransformation:
    """Scales gradients to Adam's steps, with or without the bias correction.

    The state is an `optax.ScaleByAdamState` either way.

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
    """Zeroes the elements that have no second moments, as one bit cannot say 0.

    Example:
        >>> where_known(jnp.array([2.0, 3.0]), jnp.array([0.5, 0.0])).tolist()
        [2.0, 0.0]
    """
    return jax.tree.map(lambda x, v: jnp.where(v > 0, x, 0), tree, second)


def scale_by_onebit_adam(
    steps: AdamSteps,
) -> optax.GradientTransformationExtraArgs:
    """Scales by second moments that freeze after warm-up; `update` takes `phase=`.

    In `COMPRESSED`, `updates` are the mean steps of all replicas, and `count` stays at
    the end of the warm-up. Elements without a gradient in the warm-up do not move, as
    one bit cannot say 0.

    Reference:
        1-bit Adam, arXiv:2102.02888, algorithm 1.
    """
    adam = scale_by_adam(steps)

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        phase: str = WARM_UP,
        **extra: Any,
    ) -> tuple[Any, Any]:
        del extra
        if phase != COMPRESSED:
            return adam.update(updates, state, params)
        momentum = steps.momentum_of(updates, state.nu, state.count, state.count)
        updates = where_known(updates, state.nu)
        # `nu` and `count` stay frozen: the bias correction belongs to the frozen
        # moments.
        return updates, state._replace(mu=momentum)

    return optax.GradientTransformationExtraArgs(adam.init, update)


DECAY = 0.9
"""Decay of the running mean of update norms in the warm-up of 1-bit LAMB."""


class KeptNorms(NamedTuple):
    """State of `scale_by_kept_norm`.

    Args:
        norm: Running means of the update norms in the warm-up: float32, one element per
            layer, with the parameter's number of dims.
    """

    norm: Any


def scale_by_kept_norm(
    num_stacked: Callable[[Any], int],
) -> optax.GradientTransformationExtraArgs:
    """Multiplies each update by the trust ratio of a layer; `update` takes `phase=`.

    The norm of a step in one bit is mostly quantization error, and a ratio with it
    would make steps too short. `COMPRESSED` therefore uses the mean norm from the
    warm-up, and the current norm of the parameters, which are equal on all replicas.

    Example:
        >>> tx = scale_by_kept_norm(lambda keys: 0)
        >>> params, step = jnp.array([3.0, 4.0]), jnp.array([0.0, 2.0])
        >>> _, state = tx.update(step, tx.init(params), params)
        >>> tx.update(9 * step, state, params, phase=COMPRESSED)[0].tolist()
        [0.0, 45.0]

    Reference:
        1-bit LAMB, arXiv:2104.06069, section 3.
    """

    def by_layer(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
        def call(keys: Any, x: Any, *more: Any) -> Any:
            return function(tuple(range(num_stacked(keys), x.ndim)), x, *more)

        return jax.tree_util.tree_map_with_path(call, tree, *others)

    def norms_of(tree: Any) -> Any:
        return by_layer(lambda dims, x: layer_norm(x, dims), tree)

    def init(params: Any) -> KeptNorms:
        return KeptNorms(jax.tree.map(jnp.zeros_like, norms_of(params)))

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        phase: str = WARM_UP,
        **extra: Any,
    ) -> tuple[Any, KeptNorms]:
        del extra
        used = state.norm
        if phase != COMPRESSED:
            used = norms_of(updates)
            state = KeptNorms(jax.tree.map(_mean, state.norm, used))
        ratios = jax.tree.map(ratio_of_norms, norms_of(params), used)
        return jax.tree.map(jnp.multiply, updates, ratios), state

    return optax.GradientTransformationExtraArgs(init, update)


def _mean(mean: jax.Array, norm: jax.Array) -> jax.Array:
    """Advances the running mean of norms; the first norm replaces the initial 0."""
    return jnp.where(mean == 0, norm, DECAY * mean + (1 - DECAY) * norm)
