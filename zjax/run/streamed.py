"""Executor whose step is a sequence of programs, as the state is offloaded."""

from collections.abc import Mapping
from typing import Any

import jax

from zjax.errors import PlanError, Problem
from zjax.generation.by_unit import UnitDecoder, UnitPrograms
from zjax.offload.compiled import Peak
from zjax.offload.train import OffloadedTrain
from zjax.run.compiler import step_options
from zjax.run.fused import Weights, make_jit, make_programs
from zjax.settings.schema import Config
from zjax.sharding.plan import Plan, staged_plan
from zjax.train.state import TrainState, stored_compute, without_update
from zjax.train.update import Schedule
from zjax.typing import Batch, Metrics, Model


class StreamedExecutor:
    """Executor whose step is a sequence of programs.

    Between programs the state moves to the devices and back. Evaluation and generation
    read parameters stored on the devices in one program, and offloaded blocks one by
    one.

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
        self._plan, self._shape = plan, config.model
        self._passes: Any = self.step.backward
        self._streams_blocks = config.zero.offloads_blocks and model.runs_by_block
        self.programs: Mapping[str, Any] = {}
        if not self._streams_blocks:
            pure = make_programs(model, tx, staged_plan(plan), config, schedule)
            self.programs = {"evaluate": jit(pure.evaluate)}
        elif model.stack and model.stack.continuation:
            self.generation = UnitPrograms(self._passes.units, jit)

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Takes one optimizer step and donates the state."""
        return self.step(state, batch)

    def evaluate(self, state: TrainState, batch: Batch) -> Metrics:
        """Computes loss and metrics without gradients, dropout or state change."""
        if self._streams_blocks:
            return self._passes.evaluate(state, batch)
        return self.programs["evaluate"](without_update(state, self._plan), batch)

    def decoder(self, state: TrainState) -> Any:
        """Returns the decoder that `zjax.generate` takes."""
        if not self.generation:
            return self.parameters.decoder(state)
        params = stored_compute(state, self._plan)
        return UnitDecoder(self.generation, params, self._shape)

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
