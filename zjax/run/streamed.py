"""Executors whose step is not one program: an offloaded state, compressed gradients."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from zjax.errors import NonFiniteError, PlanError, Problem, StateError
from zjax.jaxprs.versions import dtype_promotion
from zjax.models.generate import generate
from zjax.offload.compiled import Peak
from zjax.offload.generate import Generation
from zjax.offload.train import OffloadedTrain
from zjax.optim.onebit import is_of_adam
from zjax.run.compiler import step_options
from zjax.run.executor import StepNumber, make_jit
from zjax.run.fused import FusedExecutor, Weights, make_programs, make_replica_programs
from zjax.schedule.exchange import Exchanges, Rounds
from zjax.settings.schema import Config
from zjax.sharding.placement import shardings
from zjax.sharding.plan import Plan
from zjax.sharding.program_plan import staged_plan
from zjax.train.state import TrainState, state_rows, without_update
from zjax.train.update import Schedule
from zjax.typing import Batch, Metrics, Model


class StreamedExecutor:
    """Executor whose step is a sequence of programs.

    Between programs the state moves to the devices and back. Evaluation and generation
    read parameters stored on the devices in one program, and offloaded blocks one by
    one.

    Args:
        model: Model and loss as pure functions.
        tx: Optax gradient transformation.
        plan: Plan of every array; some arrays are offloaded.
        config: Settings; read for `seed`, `zero`, `optimizer`, `precision` and
            `xla_options`.
        schedule: Learning rate by applied step, for the metrics.

    Raises:
        PlanError: The optimizer cannot be updated group by group, or gains nothing from
            delayed updates; or the model has a state that blocks cannot update.
    """

    def __init__(
        self,
        model: Model,
        tx: Any,
        plan: Plan,
        config: Config,
        schedule: Schedule | None,
    ):
        jit = make_jit(plan.mesh, step_options(config, plan))
        self.step = OffloadedTrain(model, tx, plan, config, schedule, jit=jit)
        self.state_plan = self.step.state_rows
        self.parameters = Weights(model, plan)
        self.generation = None
        self._plan, self._mesh = plan, plan.mesh
        self._passes: Any = self.step.backward
        self._streams_blocks = config.zero.offloads_blocks and model.runs_by_block
        self.programs: Mapping[str, Any] = {}
        if not self._streams_blocks:
            pure = make_programs(model, tx, staged_plan(plan), config, schedule)
            self.programs = {"evaluate": jit(pure.evaluate)}
        elif model.stack and model.stack.continuation:
            units = self._passes.units
            self.generation = Generation(model.stack.continuation, units, jit)

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Takes one optimizer step and donates the state."""
        return self.step(state, batch)

    def evaluate(self, state: TrainState, batch: Batch) -> Metrics:
        """Computes loss and metrics without gradients, dropout or state change."""
        if self._streams_blocks:
            return self._passes.evaluate(state, batch)
        return self.programs["evaluate"](without_update(state, self._plan), batch)

    def generate(self, state: TrainState, tokens: Any, **settings: Any) -> jax.Array:
        """Continues prompts; `settings` are arguments of `zjax.generate`."""
        if self.generation:
            assert isinstance(self._mesh, Mesh)
            with jax.set_mesh(self._mesh), dtype_promotion():
                return self.generation(state, tokens, **settings)
        return generate(self.parameters.bind(state), tokens, **settings)

    def settle(self, state: TrainState) -> TrainState:
        """Applies a pending gradient that a delayed update left for the next step."""
        return self.step.settle(state)

    def compile(self, program: str, batch: Batch) -> jax.stages.Compiled:
        """Refuses: no single program is a step; `predict_peak` compiles all."""
        raise PlanError(
            Problem(
                "program",
                program,
                "is a sequence of programs where the state is offloaded",
                "set zero.offload=None to compile it as one",
            )
        )

    def predict_peak(self, batch: Batch) -> Peak | None:
        """Compiles all programs of a step and predicts peak memory of a device.

        Returns None where the compiler does not report memory.
        """
        return self.step.predict_peak(batch)


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
        exchanges: What replicas exchange in each step.
    """

    def __init__(
        self,
        model: Model,
        tx: Any,
        plan: Plan,
        config: Config,
        schedule: Schedule | None,
        exchanges: Exchanges,
    ):
        pure = make_replica_programs(model, tx, plan, config, schedule, exchanges)
        jit = functools.partial(jax.jit, compiler_options=step_options(config, plan))
        places = (shardings(state_rows(plan.of_replica, config)), None)
        steps = {
            name: jit(
                functools.partial(pure.train, name),
                donate_argnums=0,
                out_shardings=places,
            )
            for name in pure.phases
        }
        last = steps[exchanges.at(config.num_steps).phase.program]
        programs = steps | {"train": last, "evaluate": jit(pure.evaluate)}
        super().__init__(model, plan, config, programs)
        self._exchanges, self._number = exchanges, StepNumber()

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Takes one optimizer step and donates the state."""
        is_known, number = self._number.knows(state), self._number.before(state) + 1
        check_warm_up(state, number, self._exchanges.freeze_step, is_known=is_known)
        program = self._exchanges.at(number).phase.program
        state, metrics = self.programs[program](state, batch)
        self._number.after(state, number)
        return state, metrics
