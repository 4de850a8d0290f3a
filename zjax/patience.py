"""Early stopping: ends a run whose validation loss no longer falls."""

import math
from collections.abc import Mapping
from typing import Any

from zjax.config.schema import Evaluation

KEY = "patience"
"""Name of the counts in a checkpoint."""
REMEDY = "raise evaluation.patience to go on"


class Patience:
    """Counts evaluations in a row that did not improve on the best one.

    Args:
        evaluation: Settings `patience` and `min_improvement`.
        saved: Result of `state` of the run that continues.

    Example:
        >>> patience = Patience(Evaluation(patience=2, min_improvement=0.1))
        >>> for step, loss in ((10, 3.0), (20, 2.95), (30, math.nan)):
        ...     _ = patience.count(step, loss)
        >>> patience.reason
        'eval_loss was 3 at step 10 and not below 2.9 in 2 evaluations since'
        >>> patience.lowest
        (20, 2.95)
    """

    def __init__(self, evaluation: Evaluation, saved: Mapping[str, Any] | None = None):
        saved = saved or {}
        self._evaluation = evaluation
        self._best: float | None = saved.get("best")
        self._best_step = int(saved.get("best_step", 0))
        self._num_without = int(saved.get("num_without", 0))
        self.lowest = lowest_evaluation({KEY: saved})
        """Step and loss of the evaluation of lowest loss; None before any."""

    def count(self, step: int, loss: float) -> bool:
        """Counts the evaluation of a step; a loss that is NaN is no improvement.

        Returns:
            Whether the loss is the lowest so far, by whatever difference.
        """
        best = math.inf if self._best is None else self._best
        if loss < best - self._evaluation.min_improvement:
            self._best, self._best_step, self._num_without = loss, step, 0
        else:
            self._num_without += 1
        is_lowest = loss < (math.inf if self.lowest is None else self.lowest[1])
        if is_lowest:
            self.lowest = step, loss
        return is_lowest

    @property
    def reason(self) -> str:
        """Why the run should end; empty if it should not."""
        limit = self._evaluation.patience
        if not limit or self._num_without < limit:
            return ""
        number = f"{self._num_without} evaluations"
        if self._best is None:
            return f"eval_loss was not finite in {number}"
        bound = self._best - self._evaluation.min_improvement
        return (
            f"eval_loss was {self._best:.6g} at step {self._best_step} and not below "
            f"{bound:.6g} in {number} since"
        )

    def state(self) -> dict[str, Any]:
        """JSON values from which a run continues to count."""
        return {
            "best": self._best,
            "best_step": self._best_step,
            "num_without": self._num_without,
            "lowest": self.lowest,
        }


def lowest_evaluation(extra: Mapping[str, Any]) -> tuple[int, float] | None:
    """Reads from a checkpoint which evaluation of its run had the lowest loss.

    Args:
        extra: What the checkpoint keeps beside its arrays.

    Returns:
        Its step and loss; None where no evaluation is known.

    Example:
        >>> lowest_evaluation({"patience": {"lowest": [20, 2.5]}})
        (20, 2.5)
    """
    step, loss = (extra.get(KEY) or {}).get("lowest") or (0, None)
    return None if loss is None else (int(step), float(loss))
