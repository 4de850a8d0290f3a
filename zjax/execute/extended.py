"""A step whose batches are extended by arrays that depend on its number."""

import abc
from collections.abc import Callable, Mapping
from typing import Any

import jax

from zjax.execute.executor import Executor
from zjax.execute.step_number import StepNumber
from zjax.execute.weights import Weights
from zjax.offload.peak import Peak
from zjax.train.state import TrainState
from zjax.typing import Batch, Metrics


class ExtendedExecutor(abc.ABC):
    """An `Executor` that adds arrays to the batches of training steps.

    Args:
        executor: Runs the programs.
    """

    def __init__(self, executor: Executor):
        self._executor, self._number = executor, StepNumber()
        self.state_plan: TrainState = executor.state_plan
        self.parameters: Weights = executor.parameters
        self.programs: Mapping[str, Callable[..., Any]] = executor.programs

    @abc.abstractmethod
    def extend(self, batch: Batch, number: int) -> Batch:
        """Adds the arrays of a step, whose number is 1 or more."""

    @abc.abstractmethod
    def abstract(self, batch: Batch, number: int = 1) -> Batch:
        """Shapes of what `extend` returns, from those of a batch."""

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Takes one optimizer step; the state is donated."""
        number = self._number.before(state) + 1
        state, metrics = self._executor.train(state, self.extend(batch, number))
        self._number.after(state, number)
        return state, metrics

    def evaluate(self, state: TrainState, batch: Batch) -> Metrics:
        """Computes loss and metrics of the batch as it is."""
        return self._executor.evaluate(state, batch)

    def generate(self, state: TrainState, tokens: Any, **settings: Any) -> jax.Array:
        """Continues prompts; `settings` are those of `zjax.generate`."""
        return self._executor.generate(state, tokens, **settings)

    def settle(self, state: TrainState) -> TrainState:
        """Applies a pending gradient; the state is donated."""
        return self._executor.settle(state)

    def compile(
        self, program: str, batch: Batch, number: int = 1
    ) -> jax.stages.Compiled:
        """Compiles one of `programs`; those of training read what is added."""
        batch = batch if program == "evaluate" else self.abstract(batch, number)
        return self._executor.compile(program, batch, number)

    def predict_peak(self, batch: Batch) -> Peak | None:
        """Compiles a step on an extended batch and adds up its memory."""
        return self._executor.predict_peak(self.abstract(batch))
