"""Interface between a step and the programs that compute it, and the count of steps."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import AbstractMesh, Mesh

from zjax.offload.compiled import Jit, Peak
from zjax.run.compiler import Options
from zjax.run.fused import Weights
from zjax.sharding.mesh import is_simulated
from zjax.train.state import TrainState
from zjax.typing import Batch, Metrics, StepBatch


class StepNumber:
    """Tracks the step number on the host, to wait for the device only when unknown."""

    def __init__(self):
        self._step, self._number = None, 0

    def knows(self, state: TrainState) -> bool:
        """Whether a state is the result of the previous step, not from elsewhere."""
        # Identity of the array: comparing values would wait for the device.
        return state.step is self._step

    def before(self, state: TrainState) -> int:
        """Number of steps a state has taken; waits for the device if unknown."""
        if not self.knows(state):
            self._step, self._number = state.step, int(state.step)
        return self._number

    def after(self, state: TrainState, number: int) -> None:
        """Stores the number of steps that a new state has taken."""
        self._step, self._number = state.step, number


def make_jit(mesh: Mesh | AbstractMesh, options: Options) -> Jit:
    """Returns `jax.jit` with the compiler options of a run.

    On simulated devices the host waits for each program before it calls the next:
    collectives of two programs would share threads and could deadlock.
    """
    jit = functools.partial(jax.jit, compiler_options=options)
    if not is_simulated(mesh):
        return jit

    def jit_alone(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
        program = jit(function, **settings)

        @functools.wraps(program)
        def run_alone(*args: Any) -> Any:
            return jax.block_until_ready(program(*args))

        # Steps are also compiled without being run.
        run_alone.lower = program.lower  # type: ignore[attr-defined]
        return run_alone

    return jit_alone


@runtime_checkable
class Executor(Protocol):
    """Runs the programs of a run on placed batches and states not yet consumed.

    Args:
        state_plan: TrainState of ArrayPlan: where each array of the state is stored.
        parameters: Function from a state to the parameters as the model takes them.
        programs: Jitted functions by name.
    """

    state_plan: TrainState
    parameters: Weights
    programs: Mapping[str, Callable[..., Any]]

    def train(
        self, state: TrainState, batch: Batch | StepBatch
    ) -> tuple[TrainState, Metrics]:
        """Takes one optimizer step and donates the state."""
        ...

    def evaluate(self, state: TrainState, batch: Batch) -> Metrics:
        """Computes loss and metrics without gradients, dropout or state change."""
        ...

    def generate(self, state: TrainState, tokens: Any, **settings: Any) -> jax.Array:
        """Continues prompts; `settings` are arguments of `zjax.generate`."""
        ...

    def settle(self, state: TrainState) -> TrainState:
        """Applies a pending gradient and donates the state."""
        ...

    def compile(self, program: str, batch: Batch | StepBatch) -> jax.stages.Compiled:
        """Compiles one of `programs` for ShapeDtypeStructs of a batch."""
        ...

    def predict_peak(self, batch: Batch | StepBatch) -> Peak | None:
        """Compiles a step for ShapeDtypeStructs of a batch and adds up device memory.

        Returns None where the compiler does not report memory.
        """
        ...
