"""0/1 Adam: moments from few full gradients, and exchanges at growing intervals.

Until the freeze, replicas average in every step: full gradients to update second
moments, and the steps of 1-bit Adam between such updates. Later each replica takes
local steps with a private momentum and sends the distance moved. The mean distance
moves the shared weights, and gives the common momentum by way of the second moments.

Moments are corrected for bias, and steps are bounded; the reference implementation does
neither, and sends gradients and sums of momenta in one bit.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zjax.optim.onebit import AdamSteps, freeze_step, where_known
from zjax.settings.schema import ZeroOneAdam

VARIANCE, ONE_BIT, LOCAL, MERGED = "variance", "one_bit", "local", "merged"
APART = LOCAL, MERGED
"""Phases in which a replica steps on its own gradients; replicas merge after a `MERGED`
step."""


@dataclasses.dataclass(frozen=True)
class Intervals:
    """The schedule of phases of a run with 0/1 Adam; steps are 1 or more.

    Args:
        num_steps: Steps of the run; the last step ends with an exchange.
        freeze_step: Last step before local steps; `var_freeze_step` + 1 in DeepSpeed.
        var_update_scaler: Updates of second moments until their interval doubles.
        local_step_scaler: Local steps until the interval between exchanges doubles.
        local_step_clipper: Longest interval between exchanges, in steps.

    Example:
        >>> intervals = Intervals(20, 11, 4, 3, 4)
        >>> [step for step in range(1, 21) if intervals.at(step) == VARIANCE]
        [1, 2, 3, 4, 6, 8, 10]
        >>> [step for step in range(1, 21) if intervals.at(step) == MERGED]
        [12, 13, 14, 16, 20]

    Reference:
        0/1 Adam, arXiv:2202.06009, section 4; intervals as in DeepSpeed.
    """

    num_steps: int
    freeze_step: int
    var_update_scaler: int
    local_step_scaler: int
    local_step_clipper: int

    def at(self, step: int) -> str:
        """Returns the phase of a step."""
        if step > self.freeze_step:
            return MERGED if self.ends_after(step) else LOCAL
        return ONE_BIT if step % self._variance_interval(step) else VARIANCE

    def sent_after(self, step: int) -> int | None:
        """Returns the fragment to send after a step: 0, all parameters, or None."""
        return 0 if self.ends_after(step) else None

    def merged_after(self, step: int) -> int | None:
        """Returns the fragment to merge after a step: 0, all parameters, or None."""
        return self.sent_after(step)

    def ends_after(self, step: int) -> bool:
        """Whether replicas merge after a local step."""
        number = step - self.freeze_step
        if number <= 0:
            return False
        # Beyond 64 doublings any interval is clipped.
        doublings = min((number - 1) // self.local_step_scaler, 64)
        interval = min(self.local_step_clipper, 2**doublings)
        # The last step exchanges, so that a run ends with shared parameters.
        return step % interval == 0 or step == self.num_steps

    def forgets_errors_after(self, step: int) -> bool:
        """Whether the error feedback is reset after a step.

        At the end of ONE_BIT steps messages change from steps to distances, for which
        the old errors are meaningless.
        """
        return step == self.freeze_step

    def _variance_interval(self, step: int) -> int:
        """Returns the interval between updates of second moments at a step."""
        interval, last = 1, 0
        while True:
            # Each interval serves for `var_update_scaler` updates, then doubles.
            last = (last // interval + self.var_update_scaler) * interval
            if step <= last:
                return interval
            interval *= 2


def make_intervals(rule: ZeroOneAdam, total: int) -> Intervals:
    """Returns the schedule of a run of `total` steps with 0/1 Adam.

    Example:
        >>> make_intervals(ZeroOneAdam(), 1000).local_step_scaler
        150
    """
    last = freeze_step(rule, total)
    return Intervals(
        total,
        last,
        rule.var_update_scaler,
        rule.local_step_scaler or last,
        rule.local_step_clipper,
    )


class ZeroOneAdamState(NamedTuple):
    """State of `zero_one_adam`.

    Args:
        steps: int32[]; number of steps taken.
        variances: int32[]; number of updates of the second moments.
        mu: Momentum, in the tree of the parameters.
        nu: Second moments, in the tree of the parameters.
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


def next_steps(grads: Any, opt_state: Any, steps: AdamSteps) -> Any:
    """Returns the steps that one replica would take: the message in `ONE_BIT`."""
    # The state may sit inside a chain or a partition.
    (state,) = filter(_is_own, jax.tree.leaves(opt_state, is_leaf=_is_own))
    momentum = optax.tree_utils.tree_update_moment(grads, state.mu, steps.b1, 1)
    number = optax.safe_increment(state.steps)
    return steps.of_momentum(momentum, state.nu, number, state.variances)


def _is_own(state: Any) -> bool:
    return isinstance(state, ZeroOneAdamState)
