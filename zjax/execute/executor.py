"""What a step asks of whatever runs its programs."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax

from zjax.execute.weights import Weights
from zjax.offload.peak import Peak
from zjax.train.state import TrainState
from zjax.typing import Batch, Metrics


@runtime_checkable
class Executor(Protocol):
    """Runs the programs of a run; placed batches and states that are not consumed.

    Args:
        state_plan: A TrainState of ArrayPlan: where each array of the state is stored.
        parameters: Turns a state into the parameters as the model takes them.
        programs: Jitted functions by name.
    """

    state_plan: TrainState
    parameters: Weights
    programs: Mapping[str, Callable[..., Any]]

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Takes one optimizer step; the state is donated."""
        ...

    def evaluate(self, state: TrainState, batch: Batch) -> Metrics:
        """Computes loss and metrics without gradients, dropout or state change."""
        ...

    def generate(self, state: TrainState, tokens: Any, **settings: Any) -> jax.Array:
        """Continues prompts; `settings` are those of `zjax.generate`."""
        ...

    def settle(self, state: TrainState) -> TrainState:
        """Applies a pending gradient; the state is donated."""
        ...

    def compile(
        self, program: str, batch: Batch, number: int = 1
    ) -> jax.stages.Compiled:
        """Compiles one of `programs` for a batch of ShapeDtypeStructs of a step."""
        ...

    def predict_peak(self, batch: Batch) -> Peak | None:
        """Compiles for a batch of ShapeDtypeStructs and adds up memory.

        None where the compiler does not report memory.
        """
        ...
