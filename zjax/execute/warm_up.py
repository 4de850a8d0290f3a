"""A warm-up of which no step was taken leaves nothing to go on with."""

from zjax.errors import NonFiniteError, Problem
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
