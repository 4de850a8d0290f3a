"""States with which a run whose second moments are kept cannot go on."""

import numpy as np
import optax

from zjax.errors import NonFiniteError, Problem, StateError
from zjax.train.state import TrainState


def check_warm_up(state: TrainState, number: int, freeze_step: int) -> None:
    """Refuses to keep second moments that no gradient has updated.

    Args:
        state: Before a step; waits for it before the first step after the freeze alone.
        number: Number of the step, 1 or more.
        freeze_step: Last step of the warm-up; 0 for no freeze.

    Raises:
        NonFiniteError: All steps of the warm-up were skipped.
    """
    if not freeze_step or number != freeze_step + 1:
        return
    if int(state.num_skipped) == freeze_step:
        problem = "ends a warm-up whose steps were all skipped, and nothing would move"
        remedy = "use more, or a smaller precision.loss_scale.initial"
        raise NonFiniteError(
            Problem("optimizer.freeze_step", freeze_step, problem, remedy)
        )


def check_together(state: TrainState, number: int, freeze_step: int) -> None:
    """Refuses to let replicas step together from parameters that differ.

    Args:
        state: Before the step, of `zero_one_adam`; waits for it.
        number: Number of the step, 1 or more.
        freeze_step: Last step that replicas take together.

    Raises:
        StateError: The run had another freeze, and its replicas have stepped apart.
    """
    rates = optax.tree_utils.tree_get(state.extra.replicas.opt_state, "rate_sum")
    if any(np.any(np.asarray(shard.data)) for shard in rates.addressable_shards):
        problem = f"joins replicas at step {number} that have stepped apart"
        remedy = f"use {number - 1} or less, or a state after an exchange"
        raise StateError(Problem("optimizer.freeze_step", freeze_step, problem, remedy))
