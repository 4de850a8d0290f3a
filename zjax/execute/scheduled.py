"""A step that tells the model numbers that change from step to step."""

import jax
import numpy as np

from zjax.config.step_values import StepValues
from zjax.execute.executor import Executor
from zjax.execute.extended import ExtendedExecutor
from zjax.sharding.plan import Plan
from zjax.typing import Batch

SCHEDULE = "schedule"
"""Name in the batch of the values of a step."""


class ScheduledExecutor(ExtendedExecutor):
    """Adds the values of its step to each batch, as scalars on all devices.

    Args:
        executor: Runs the programs.
        values: Function from the number of a step to its values.
        plan: Plan of the run.
    """

    def __init__(self, executor: Executor, values: StepValues, plan: Plan):
        super().__init__(executor)
        self._values, self._place = values, plan.replicated

    def extend(self, batch: Batch, number: int) -> Batch:
        """Adds float32[] by name."""

        def place(value: float) -> jax.Array:
            # Every process knows the number, and places it without the others.
            x = np.float32(value)
            return jax.make_array_from_callback((), self._place, lambda _: x)

        return batch | {SCHEDULE: jax.tree.map(place, self._values(number))}

    def abstract(self, batch: Batch, number: int = 1) -> Batch:
        """Shapes of a batch with the values."""
        scalar = jax.ShapeDtypeStruct((), np.float32, sharding=self._place)
        return batch | {SCHEDULE: dict.fromkeys(self._values(1), scalar)}
