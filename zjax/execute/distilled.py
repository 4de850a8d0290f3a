"""A step that learns from a teacher until its stage ends."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from zjax.execute.executor import Executor
from zjax.execute.step_number import StepNumber
from zjax.execute.teacher import Teacher
from zjax.execute.weights import Weights
from zjax.offload.peak import Peak
from zjax.train.state import TrainState
from zjax.typing import Batch, Metrics


class DistilledExecutor:
    """An `Executor` that adds what a teacher says to the batches of the first steps.

    Later steps run the programs of a run without a teacher.

    Args:
        executor: Runs the student.
        teacher: The teacher.
        num_steps: Steps that learn from it.
    """

    def __init__(self, executor: Executor, teacher: Teacher, num_steps: int):
        self.student, self.teacher, self.num_steps = executor, teacher, num_steps
        self._number = StepNumber()
        self.state_plan: TrainState = executor.state_plan
        self.parameters: Weights = executor.parameters
        self.programs: Mapping[str, Callable[..., Any]] = executor.programs

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Takes one optimizer step; the state is donated."""
        number = self._number.before(state) + 1
        if number <= self.num_steps:
            batch = self.teacher.teach(batch)
        else:
            self.teacher.release()
        state, metrics = self.student.train(state, batch)
        self._number.after(state, number)
        return state, metrics

    def evaluate(self, state: TrainState, batch: Batch) -> Metrics:
        """Computes loss and metrics without teacher, gradients or dropout."""
        return self.student.evaluate(state, batch)

    def generate(self, state: TrainState, tokens: Any, **settings: Any) -> jax.Array:
        """Continues prompts; `settings` are those of `zjax.generate`."""
        return self.student.generate(state, tokens, **settings)

    def settle(self, state: TrainState) -> TrainState:
        """Applies a pending gradient; the state is donated."""
        return self.student.settle(state)

    def compile(self, program: str, batch: Batch) -> jax.stages.Compiled:
        """Compiles one of `programs`; those of training learn from the teacher."""
        return self.student.compile(program, self._taught(program, batch))

    def predict_peak(self, batch: Batch) -> Peak | None:
        """Compiles a step with the teacher's results; its parameters come on top."""
        return self.student.predict_peak(self._taught("train", batch))

    def _taught(self, program: str, batch: Batch) -> Batch:
        return batch if program == "evaluate" else self.teacher.abstract(batch)
