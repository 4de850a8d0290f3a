"""A step that measures the divergence from the reference before it learns.

The loss of KTO compares log-ratios with the mean over the global batch. A mean over a
microbatch would make the loss depend on how the batch is split.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from zjax.rl.comparisons import DIVERGENCE
from zjax.run.step import Step
from zjax.train.average import with_part
from zjax.train.state import TrainState
from zjax.typing import Batch, Metrics


@dataclasses.dataclass(frozen=True)
class DivergenceStep(Step):
    """Step, and evaluation, in two passes: the first gives the divergence."""

    @classmethod
    def of(cls, step: Step) -> "DivergenceStep":
        """Makes the step in two passes of a step in one."""
        fields = dataclasses.fields(step)
        return cls(**{field.name: getattr(step, field.name) for field in fields})

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Takes one optimizer step, as `Step` does."""
        return super().__call__(state, self._extended(with_part(state, "raw"), batch))

    def evaluate(self, state: TrainState, batch: Batch) -> Metrics:
        """Computes loss and metrics, as `Step` does."""
        return super().evaluate(state, self._extended(state, batch))

    def compile(
        self, batch: Batch, program: str = "train", number: int | None = None
    ) -> jax.stages.Compiled:
        """Compiles a program for the batch with a divergence, as `Step` does."""
        given = jax.ShapeDtypeStruct((), jnp.float32)
        return super().compile(batch | {DIVERGENCE: given}, program, number)

    def _extended(self, state: TrainState, batch: Batch) -> Any:
        """Adds the divergence of a state from the reference to a batch."""
        placed = self.place_batch(batch)
        return placed | {DIVERGENCE: super().evaluate(state, placed)[DIVERGENCE]}
