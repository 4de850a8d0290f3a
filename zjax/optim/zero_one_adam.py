"""0/1 Adam: second moments from few full gradients, then local steps between messages.

Lu et al., arXiv:2202.06009. Until the freeze, gradients are averaged in every step, in
full where second moments are updated and in one bit per number elsewhere. Then each
replica takes local steps with its own momentum. What they send is how far they moved
times the root of the second moments: the sum of their momenta, weighted by learning
rates. Its mean moves the shared weights and gives the momentum of all.

Moments are corrected for their bias, which the reference implementation does not do:
after few updates it would keep second moments that are too small.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zjax.optim.intervals import LOCAL, MERGED, VARIANCE


class ZeroOneAdamState(NamedTuple):
    """The state of `zero_one_adam`.

    Args:
        steps: int32[]; steps taken.
        variances: int32[]; updates of the second moments.
        mu: Momentum.
        nu: Second moments.
        rate_sum: float32[]; sum of the learning rates since replicas met.
    """

    steps: Any
    variances: Any
    mu: Any
    nu: Any
    rate_sum: Any


def make_sent_momentum(b2: float, eps: float) -> Callable[[Any, Any], Any]:
    """Builds what replicas send after local steps.

    Args:
        b2: That of `zero_one_adam`.
        eps: That of `zero_one_adam`.

    Returns:
        A function of how far a replica moved downhill, and of the state of its
        optimizer: momenta of its steps times learning rates, summed.

    Example:
        >>> state = ZeroOneAdamState(1, 1, 0.0, jnp.array([2.0]), 0.0)
        >>> make_sent_momentum(0.5, 1.0)(jnp.array([0.5]), state).tolist()
        [1.5]
    """

    def sent_momentum(moved: Any, opt_state: Any) -> Any:
        second, variances = (
            optax.tree_utils.tree_get(opt_state, name) for name in ("nu", "variances")
        )
        return jax.tree.map(
            lambda x, v: x * _denominator(v, variances, b2, eps), moved, second
        )

    return sent_momentum


def zero_one_adam(
    schedule: Callable[..., Any],
    b1: float,
    b2: float,
    eps: float,
    decay_of: Callable[[Any], Any],
) -> optax.GradientTransformationExtraArgs:
    """0/1 Adam with the learning rate; `update` takes `phase=`.

    Gradients are those of one replica in `LOCAL`, and means in `VARIANCE` and
    `ONE_BIT`. `MERGED` takes the mean of `make_sent_momentum` and the parameters that
    replicas shared last.
    Weights do not decay in local steps: the shared ones do in `MERGED`, with the sum of
    the learning rates, so that the momentum is free of decay. Elements that had no
    gradient when second moments were updated do not move, as one bit cannot say 0.

    Args:
        schedule: Learning rate by step.
        b1: Decay of the momentum, 0 or more and less than 1.
        b2: Decay of the second moments, 0 or more and less than 1.
        eps: Added to the root of the second moments, above 0.
        decay_of: Weight decay by parameter, a tree of numbers, of the parameters.

    Returns:
        A transformation of `ZeroOneAdamState`.

    Example:
        >>> tx = zero_one_adam(lambda step: 0.5, 0.0, 0.75, 1e-8, lambda p: 0.0)
        >>> params = grads = jnp.array([4.0])
        >>> updates, _ = tx.update(grads, tx.init(params), params, phase=VARIANCE)
        >>> updates.tolist()
        [-0.5]

    Reference:
        0/1 Adam, arXiv:2202.06009, algorithm 1.
    """

    def init(params: Any) -> ZeroOneAdamState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        none = jnp.zeros((), jnp.int32)
        return ZeroOneAdamState(none, none, zeros, zeros, jnp.zeros((), jnp.float32))

    def descended(momentum: Any, state: Any, rate: Any) -> Any:
        return jax.tree.map(
            lambda m, v: -rate * m / _denominator(v, state.variances, b2, eps),
            momentum,
            state.nu,
        )

    def decayed(updates: Any, params: Any, rate: Any) -> Any:
        return jax.tree.map(
            lambda u, p, d: u - rate * d * p, updates, params, decay_of(params)
        )

    def step(grads: Any, state: Any, params: Any, phase: str) -> Any:
        rate = schedule(state.steps)
        if phase == VARIANCE:
            second = optax.tree_utils.tree_update_moment(grads, state.nu, b2, 2)
            variances = optax.safe_increment(state.variances)
            state = state._replace(nu=second, variances=variances)
        momentum = optax.tree_utils.tree_update_moment(grads, state.mu, b1, 1)
        momentum = _with_moments(momentum, state.nu)
        state = state._replace(mu=momentum, steps=optax.safe_increment(state.steps))
        corrected = rate / (1 - b1**state.steps)
        updates = descended(momentum, state, corrected)
        if phase == LOCAL:
            return updates, state._replace(rate_sum=state.rate_sum + corrected)
        return decayed(updates, params, rate), state

    def merge(mean: Any, state: Any, params: Any) -> Any:
        mean = _with_moments(mean, state.nu)
        rate_sum = state.rate_sum
        updates = decayed(descended(mean, state, 1), params, rate_sum)
        # Where every replica skipped every step, the momentum is still that of all.
        has_moved = rate_sum > 0
        total = jnp.where(has_moved, rate_sum, 1)
        momentum = jax.tree.map(
            lambda x, m: jnp.where(has_moved, x / total, m), mean, state.mu
        )
        return updates, state._replace(mu=momentum, rate_sum=jnp.zeros_like(rate_sum))

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        phase: str = VARIANCE,
        **extra: Any,
    ) -> tuple[Any, Any]:
        del extra
        if phase == MERGED:
            return merge(updates, state, params)
        return step(updates, state, params, phase)

    return optax.GradientTransformationExtraArgs(init, update)


def _denominator(second: Any, variances: Any, b2: float, eps: float) -> Any:
    bias = 1 - b2 ** jnp.float32(variances)
    return jnp.sqrt(second / jnp.where(bias > 0, bias, 1)) + eps


def _with_moments(tree: Any, second: Any) -> Any:
    return jax.tree.map(lambda x, v: jnp.where(v > 0, x, 0), tree, second)
