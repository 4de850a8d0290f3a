"""Executor whose replicas exchange compressed gradients, with one program per phase."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zjax.errors import NonFiniteError, Problem, StateError
from zjax.optim.onebit import is_of_adam
from zjax.optim.phases import Phases
from zjax.optim.rounds import Rounds
from zjax.optim.zero_one_adam import Intervals
from zjax.run.compiler import step_options
from zjax.run.executor import StepNumber
from zjax.run.fused import FusedExecutor
from zjax.run.programs import make_replica_programs
from zjax.settings.schema import Config
from zjax.sharding.placement import shardings
from zjax.sharding.plan import Plan
from zjax.train.state import TrainState, state_rows
from zjax.train.update import Schedule
from zjax.typing import Batch, Metrics, Model


def check_warm_up(
    state: TrainState, number: int, freeze_step: int, *, is_known: bool
) -> None:
    """Refuses to freeze second moments that no gradient has updated.

    Waits for the state at the first step after the freeze, and at later steps if the
    previous step did not return the state (`is_known`). `freeze_step=0` means no
    freeze.
    """
    is_checked = number == freeze_step + 1 or not is_known
    if not freeze_step or number <= freeze_step or not is_checked:
        return
    if not bool(_were_updated(_updates_of_moments(state))):
        problem = "ends a warm-up whose updates of second moments were all skipped, "
        problem += "and nothing would move"
        remedy = "use more, or a smaller precision.loss_scale.initial"
        raise NonFiniteError(
            Problem("optimizer.rule.freeze_step", freeze_step, problem, remedy)
        )


def _updates_of_moments(state: TrainState) -> jax.Array:
    """Number of steps that updated second moments, int32[]; int32[N] for N replicas."""
    opt_state = getattr(state.extra, "replicas", state).opt_state
    number = optax.tree_utils.tree_get(opt_state, "variances")
    if number is None:
        return optax.tree_utils.tree_get(opt_state, "count", filtering=is_of_adam)
    return number


@jax.jit
def _were_updated(numbers: jax.Array) -> jax.Array:
    return jnp.all(numbers > 0)


def check_together(state: TrainState, rounds: Rounds | Intervals) -> None:
    """Refuses a joint step of replicas whose states differ; waits for the state."""
    replicas = dataclasses.replace(state.extra.replicas, num_skipped=())
    if not bool(_differ(replicas)):
        return
    done = int(state.step)
    if isinstance(rounds, Rounds):
        field = "communication.local_steps.num_synchronous_steps"
        value = rounds.num_synchronous_steps
    else:
        field, value = "optimizer.rule.freeze_step", rounds.freeze_step
    problem = f"joins replicas at step {done + 1} that have stepped apart"
    remedy = f"use {done} or less, or a state whose replicas are equal"
    raise StateError(Problem(field, value, problem, remedy))


@jax.jit
def _differ(replicas: TrainState) -> jax.Array:
    """Whether any replica differs from the first; NaN equals NaN."""

    def differs(x: jax.Array) -> jax.Array:
        first = x[:1]
        # NaN differs from itself: two NaNs count as equal.
        return jnp.any((x != first) & ((x == x) | (first == first)))

    return jnp.any(jnp.stack([*map(differs, jax.tree.leaves(replicas))]))


class ReplicatedExecutor(FusedExecutor):
    """Executor that picks the program of a step by the step's phase, on the host.

    Programs are one step per phase, by the names of phases; `train`, the step of the
    last phase; and `evaluate`.

    Args:
        model: Model and loss as pure functions.
        tx: Optax gradient transformation whose update takes a phase.
        plan: Plan of every array, all on the devices.
        config: Checked settings.
        schedule: Learning rate by applied step, for the metrics.
        phases: Phases of the run, each with the codec of the messages.
    """

    def __init__(
        self,
        model: Model,
        tx: Any,
        plan: Plan,
        config: Config,
        schedule: Schedule | None,
        phases: Phases,
    ):
        pure = make_replica_programs(model, tx, plan, config, schedule, phases)
        jit = functools.partial(jax.jit, compiler_options=step_options(config, plan))
        places = (shardings(state_rows(plan.of_replica, config)), None)
        steps = {
            name: jit(
                functools.partial(pure.train, name),
                donate_argnums=0,
                out_shardings=places,
            )
            for name in phases.by_name
        }
        last = steps[phases.at(config.num_steps)]
        programs = steps | {"train": last, "evaluate": jit(pure.evaluate)}
        super().__init__(model, plan, config, programs)
        self._phases, self._number = phases, StepNumber()

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Takes one optimizer step and donates the state."""
        is_known, number = self._number.knows(state), self._number.before(state) + 1
        check_warm_up(state, number, self._phases.freeze_step, is_known=is_known)
        state, metrics = self.programs[self._phases.at(number)](state, batch)
        self._number.after(state, number)
        return state, metrics
