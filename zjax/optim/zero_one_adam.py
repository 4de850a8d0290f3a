"""0/1 Adam: moments from few full gradients, and exchanges at growing intervals.

Until the freeze, replicas average in every step: full gradients to update second
moments, and the steps of 1-bit Adam between such updates. Later each replica takes
local steps with a private momentum and sends the distance moved. The mean distance
moves the shared weights, and gives the common momentum by way of the second moments.

Moments are corrected for bias, and steps are bounded; the reference implementation does
neither, and sends gradients and sums of momenta in one bit.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zjax.optim.onebit import AdamSteps, make_adam_steps, where_known
from zjax.schedule.exchange import LOCAL, MERGED, ONE_BIT, VARIANCE, Phase
from zjax.settings.schema import Compressed, Rule


class ZeroOneAdamState(NamedTuple):
    """State of `zero_one_adam`.

    Args:
        steps: int32[]; number of steps taken.
        variances: int32[]; number of updates of the second moments.
        rate_sum: float32[]; sum of the learning rates since replicas merged.
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
    """0/1 Adam including the learning rate; `update` takes `phase=`.

    `LOCAL` takes the gradients of one replica, `VARIANCE` the mean gradients, `ONE_BIT`
    the mean of `next_steps`, and `MERGED` the anchor (the parameters shared last) with
    the mean distance that replicas moved downhill from the anchor. `decay_of` maps
    parameters to a tree of weight decays.

    Weights do not decay in local steps: the anchor decays in `MERGED`, by the sum of
    the learning rates, so that the momentum is free of decay. Elements without a
    gradient at every update of second moments do not move, as one bit cannot say 0.

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
        # Second moments lag behind local gradients, so steps need the bound.
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
        # `moved` is the anchor minus the parameters, whereas updates are added.
        downhill = jax.tree.map(jnp.negative, moved)
        updates = decayed(downhill, params, state.rate_sum)
        # Where every replica skipped every step, the momentum is still that of all.
        has_moved = state.rate_sum > 0
        total = jnp.where(has_moved, state.rate_sum, 1)
        mean = jax.tree.map(lambda x: x / total, moved)
        # Mean distance per learning rate is the mean step, from which the momentum
        # follows.
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


def make_message(rule: Rule, phase: Phase) -> Callable[[Any, Any], Any] | None:
    """Returns `message(grads, opt_state)`, the tree that replicas average in a phase.

    Returns None where replicas average gradients.
    """
    if phase.message != "steps":
        return None
    assert isinstance(rule, Compressed)
    return functools.partial(next_steps, steps=make_adam_steps(rule))


def next_steps(grads: Any, opt_state: Any, steps: AdamSteps) -> Any:
    """Returns the steps that one replica would take with its gradients."""
    state = adam_state(opt_state)
    momentum = optax.tree_utils.tree_update_moment(grads, state.mu, steps.b1, 1)
    if isinstance(state, ZeroOneAdamState):
        counts = optax.safe_increment(state.steps), state.variances
    else:
        # The bias correction stays at the freeze, as the second moments do.
        counts = state.count, state.count
    return steps.of_momentum(momentum, state.nu, *counts)


def adam_state(opt_state: Any) -> Any:
    """Finds the moments in the state of a rule that compresses messages."""
    # The state may sit inside a chain or a partition.
    leaves = jax.tree.leaves(opt_state, is_leaf=_has_moments)
    (state,) = filter(_has_moments, leaves)
    return state


def _has_moments(state: Any) -> bool:
    return isinstance(state, ZeroOneAdamState | optax.ScaleByAdamState)
