"""Placement of batches that every process makes whole, of one rollout."""

from typing import Any

import jax

from zjax.data.entries import check_batch
from zjax.run.step import Step
from zjax.typing import Batch


def place_whole(step: Step, batch: Batch) -> Any:
    """Places a batch of the rows of all processes on the devices.

    Args:
        step: Step of the run.
        batch: Arrays on the host, equal in all processes.

    Returns:
        Global arrays, as `Step.place_batch` returns.

    Raises:
        DataError: The batch lacks arrays that the model requires.
        PlanError: Rows do not divide over the devices.
    """
    if jax.process_count() == 1:
        return step.place_batch(batch)
    # NumPy arrays would be taken for the rows of this process alone.
    batch = check_batch(batch, step.model.entries)
    placed = jax.tree.map(
        lambda x, place: jax.make_array_from_callback(x.shape, place, x.__getitem__),
        batch,
        step.batch_shardings(batch),
    )
    return step.place_batch(placed)
