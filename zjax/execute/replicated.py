"""A step whose replicas send each other packed messages, one program for each phase."""

import functools
from typing import Any

import jax

from zjax.compiler import step_options
from zjax.config.schema import Config
from zjax.execute.fused import FusedExecutor
from zjax.execute.state_checks import check_warm_up
from zjax.execute.step_number import StepNumber
from zjax.optim.phases import Phases
from zjax.sharding.plan import Plan
from zjax.train.replicas import make_replica_programs
from zjax.train.state import TrainState
from zjax.train.update import Schedule
from zjax.typing import Batch, Metrics, Model


class ReplicatedExecutor(FusedExecutor):
    """An `Executor` whose host chooses the program of a step by its number.

    Its programs are those of the phases by their names, `train`, which is that of the
    last phase, and `evaluate`.

    Args:
        model: Model and loss as pure functions.
        tx: Optax gradient transformation, which takes the phases.
        plan: Placement of every array, all on the devices.
        config: Checked settings.
        schedule: Learning rate by applied step, for the metrics.
        phases: What replicas send.
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
        places = (pure.state_shardings, None)
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
        """Takes one optimizer step; the state is donated."""
        is_known, number = self._number.knows(state), self._number.before(state) + 1
        check_warm_up(state, number, self._phases.freeze_step, is_known=is_known)
        state, metrics = self.programs[self._phases.at(number)](state, batch)
        self._number.after(state, number)
        return state, metrics
