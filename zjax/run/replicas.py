"""Executor of replicas that exchange messages smaller than gradients, or fewer."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from zjax.errors import NonFiniteError, Problem, StateError
from zjax.optim.zero_one_adam import ZeroOneAdamState, adam_state
from zjax.replicas.engine import Engine
from zjax.replicas.state import averaged_at_ends, of_replicas, run_rows
from zjax.run.compiler import step_options
from zjax.run.fused import FusedExecutor, StepNumber, make_programs
from zjax.schedule.exchange import TRAIN, Exchanges, Rounds
from zjax.settings.schema import Config
from zjax.sharding.placement import abstract_tree
from zjax.sharding.plan import Plan
from zjax.train.state import TrainState
from zjax.train.update import Schedule
from zjax.typing import Batch, Metrics, Model


class ReplicasExecutor(FusedExecutor):
    """Executor whose replicas send little: codecs, 1-bit and 0/1 Adam, DiLoCo."""

    def __init__(
        self,
        model: Model,
        tx: Any,
        plan: Plan,
        config: Config,
        schedule: Schedule | None,
        exchanges: Exchanges,
    ):
        self._engine = Engine(
            lambda tx, plan, sent: make_programs(
                model, tx, plan, config, schedule, sent
            ),
            model,
            tx,
            plan,
            run_rows(plan, config),
            exchanges,
            config.optimizer.rule,
            config.communication.rounds,
        )
        jit = functools.partial(jax.jit, compiler_options=step_options(config, plan))
        programs = self._engine.programs(jit, config.num_steps)
        super().__init__(model, plan, config, programs)
        self._exchanges, self._number = exchanges, StepNumber()

    def state_of(self, program: str) -> TrainState:
        """ArrayPlans of the state that a program reads."""
        rows = super().state_of(program)
        is_apart = program == TRAIN and self._exchanges.steps_apart
        return of_replicas(rows) if is_apart else rows

    def inputs_of(self, program: str, batch: Batch) -> tuple[Any, ...]:
        """Shapes of a program's arguments."""
        kind, _, number = program.rpartition("_")
        if kind == "mean":
            anchor, outer = self.state_plan.master, self.state_plan.extra
            outer_gradients = self.programs[f"outer_gradients_{number}"]
            places = abstract_tree((anchor, outer.replicas))
            grads = outer_gradients.lower(*places).compile()
            return _outputs(grads), abstract_tree(outer.errors[int(number)])
        if program == "end_of_round":
            replicas = self.state_plan.extra.replicas
            averaged = averaged_at_ends(replicas, self.state_plan)
            metrics = _outputs(self.compile(TRAIN, batch))[1]
            return *abstract_tree((averaged, replicas.num_skipped)), metrics
        return super().inputs_of(program, batch)

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Takes a step, then sends or merges fragments due; donates the state."""
        is_known, number = self._number.knows(state), self._number.before(state) + 1
        exchange, exchanges = self._exchanges.at(number), self._exchanges
        check_warm_up(state, number, exchanges.freeze_step, is_known=is_known)
        is_joint = exchanges.steps_apart and exchange.phase.message != "nothing"
        if is_joint and not is_known and number > 1:
            # A state from elsewhere may have stepped apart; comparing replicas waits
            # for the device.
            check_together(state, exchanges)
        state, metrics = self._engine.take_step(self.programs, exchange, state, batch)
        self._number.after(state, number)
        return state, metrics


def _outputs(compiled: jax.stages.Compiled) -> Any:
    """Shapes of a program's results, with shardings."""
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        compiled.out_info,
        compiled.output_shardings,
    )


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
    found = adam_state(getattr(state.extra, "replicas", state).opt_state)
    return found.variances if isinstance(found, ZeroOneAdamState) else found.count


@jax.jit
def _were_updated(numbers: jax.Array) -> jax.Array:
    return jnp.all(numbers > 0)


def check_together(state: TrainState, exchanges: Exchanges) -> None:
    """Refuses a joint step of replicas whose states differ; waits for the state."""
    replicas = dataclasses.replace(state.extra.replicas, num_skipped=())
    if not bool(_differ(replicas)):
        return
    done = int(state.step)
    if isinstance(exchanges, Rounds):
        field = "communication.local_steps.num_synchronous_steps"
        value = exchanges.num_synchronous_steps
    else:
        field, value = "optimizer.rule.freeze_step", exchanges.freeze_step
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
