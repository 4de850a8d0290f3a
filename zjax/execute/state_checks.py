"""States with which a run whose second moments are kept cannot go on."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from zjax.errors import NonFiniteError, Problem, StateError
from zjax.optim.intervals import Intervals
from zjax.optim.onebit_adam import is_of_adam
from zjax.optim.rounds import Rounds
from zjax.train.state import TrainState


def check_warm_up(
    state: TrainState, number: int, freeze_step: int, *, is_known: bool
) -> None:
    """Refuses to keep second moments that no gradient has updated.

    Args:
        state: Before a step; waits for it at the first step after the freeze, and at
            later ones where it is from elsewhere.
        number: Number of the step, 1 or more.
        freeze_step: Last step of the warm-up; 0 for no freeze.
        is_known: Whether the step before returned the state.

    Raises:
        NonFiniteError: All steps that update second moments were skipped.
    """
    is_checked = number == freeze_step + 1 or not is_known
    if not freeze_step or number <= freeze_step or not is_checked:
        return
    if not bool(_were_updated(_updates_of_moments(state))):
        problem = "ends a warm-up whose updates of second moments were all skipped, "
        problem += "and nothing would move"
        remedy = "use more, or a smaller precision.loss_scale.initial"
        raise NonFiniteError(
            Problem("optimizer.freeze_step", freeze_step, problem, remedy)
        )


def _updates_of_moments(state: TrainState) -> jax.Array:
    """How many steps have updated second moments, int32[]; [N] of replicas."""
    opt_state = getattr(state.extra, "replicas", state).opt_state
    number = optax.tree_utils.tree_get(opt_state, "variances")
    if number is None:
        return optax.tree_utils.tree_get(opt_state, "count", filtering=is_of_adam)
    return number


@jax.jit
def _were_updated(numbers: jax.Array) -> jax.Array:
    return jnp.all(numbers > 0)


def check_together(state: TrainState, rounds: Rounds | Intervals) -> None:
    """Refuses to let replicas step together that differ.

    Args:
        state: Before the step; waits for it.
        rounds: Says how many steps the replicas take together.

    Raises:
        StateError: The run took fewer, and its replicas have stepped apart.
    """
    replicas = dataclasses.replace(state.extra.replicas, num_skipped=())
    if not bool(_differ(replicas)):
        return
    done = int(state.step)
    if isinstance(rounds, Rounds):
        field = "communication.num_synchronous_steps"
        value = rounds.num_synchronous_steps
    else:
        field, value = "optimizer.freeze_step", rounds.freeze_step
    problem = f"joins replicas at step {done + 1} that have stepped apart"
    remedy = f"use {done} or less, or a state whose replicas are equal"
    raise StateError(Problem(field, value, problem, remedy))


@jax.jit
def _differ(replicas: TrainState) -> jax.Array:
    """Whether any replica has other numbers than the first; NaN is one."""

    def differs(x: jax.Array) -> jax.Array:
        first = x[:1]
        return jnp.any((x != first) & ((x == x) | (first == first)))

    return jnp.any(jnp.stack([*map(differs, jax.tree.leaves(replicas))]))
