"""0/1 Adam: second moments from few full gradients, then local steps between messages.

Lu et al., arXiv:2202.06009. Until the freeze, replicas average something in every step:
gradients in full where second moments are updated, and elsewhere the steps of 1-bit
Adam. Then each replica takes local steps with its own momentum. What they send is how
far they moved. Its mean moves the shared weights, and gives the momentum of all by the
second moments.

Moments are corrected for their bias unless `optimizer.bias_correction` is off, and
steps are bounded. The reference implementation does neither, and sends gradients and
sums of momenta in one bit.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zjax.optim.adam_steps import AdamSteps, where_known
from zjax.optim.intervals import LOCAL, MERGED, ONE_BIT, VARIANCE


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


def zero_one_adam(
    schedule: Callable[..., Any],
    steps: AdamSteps,
    decay_of: Callable[[Any], Any],
) -> optax.GradientTransformationExtraArgs:
    """0/1 Adam with the learning rate; `update` takes `phase=`.

    `LOCAL` takes the gradients of one replica, `VARIANCE` their mean, `ONE_BIT` the
    mean of `next_steps`, and `MERGED` the mean of how far replicas moved downhill from
    the parameters that they shared last, and these.
    Weights do not decay in local steps: the shared ones do in `MERGED`, with the sum of
    the learning rates, so that the momentum is free of decay. Elements that had no
    gradient when second moments were updated do not move, as one bit cannot say 0.

    Args:
        schedule: Learning rate by step.
        steps: Decays of the moments, and steps by moments that are kept.
        decay_of: Weight decay by parameter, a tree of numbers, of the parameters.

    Returns:
        A transformation of `ZeroOneAdamState`.

    Example:
        >>> steps = AdamSteps(0.0, 0.75, 1e-8)
        >>> tx = zero_one_adam(lambda step: 0.5, steps, lambda p: 0.0)
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

    def decayed(updates: Any, params: Any, rate: Any) -> Any:
        return jax.tree.map(
            lambda u, p, d: u - rate * d * p, updates, params, decay_of(params)
        )

    def step(grads: Any, state: Any, params: Any, phase: str) -> Any:
        rate, moment = schedule(state.steps), optax.tree_utils.tree_update_moment
        if phase == VARIANCE:
            second = moment(grads, state.nu, steps.b2, 2)
            variances = optax.safe_increment(state.variances)
            state = state._replace(nu=second, variances=variances)
        momentum = moment(grads, state.mu, steps.b1, 1)
        state = state._replace(mu=momentum, steps=optax.safe_increment(state.steps))
        scale = steps.of_momentum if phase == LOCAL else steps.unbounded
        scaled = scale(momentum, state.nu, state.steps, state.variances)
        updates = jax.tree.map(lambda u: -rate * u, scaled)
        if phase == LOCAL:
            return updates, state._replace(rate_sum=state.rate_sum + rate)
        return decayed(updates, params, rate), state

    def follow(mean: Any, state: Any, params: Any) -> Any:
        rate, number = schedule(state.steps), optax.safe_increment(state.steps)
        mean = where_known(mean, state.nu)
        momentum = steps.momentum_of(mean, state.nu, number, state.variances)
        updates = jax.tree.map(lambda u: -rate * u, mean)
        state = state._replace(mu=momentum, steps=number)
        return decayed(updates, params, rate), state

    def merge(moved: Any, state: Any, params: Any) -> Any:
        moved = where_known(moved, state.nu)
        downhill = jax.tree.map(jnp.negative, moved)
        updates = decayed(downhill, params, state.rate_sum)
        # Where every replica skipped every step, the momentum is still that of all.
        has_moved = state.rate_sum > 0
        total = jnp.where(has_moved, state.rate_sum, 1)
        mean = jax.tree.map(lambda x: x / total, moved)
        momentum = steps.momentum_of(mean, state.nu, state.steps, state.variances)
        momentum = jax.tree.map(
            lambda new, old: jnp.where(has_moved, new, old), momentum, state.mu
        )
        zero = jnp.zeros_like(state.rate_sum)
        return updates, state._replace(mu=momentum, rate_sum=zero)

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
        if phase == ONE_BIT:
            return follow(updates, state, params)
        return step(updates, state, params, phase)

    return optax.GradientTransformationExtraArgs(init, update)


def next_steps(grads: Any, opt_state: Any, steps: AdamSteps) -> Any:
    """The steps that one replica would take, which it sends in `ONE_BIT`.

    Args:
        grads: Gradients of the replica.
        opt_state: State of an optimizer with `zero_one_adam`.
        steps: Those of the optimizer.
    """
    (state,) = filter(_is_own, jax.tree.leaves(opt_state, is_leaf=_is_own))
    momentum = optax.tree_utils.tree_update_moment(grads, state.mu, steps.b1, 1)
    number = optax.safe_increment(state.steps)
    return steps.of_momentum(momentum, state.nu, number, state.variances)


def _is_own(state: Any) -> bool:
    return isinstance(state, ZeroOneAdamState)
