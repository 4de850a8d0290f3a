"""Steps whose loss or gradients are not finite: which of them end the run, and why.

A skipped step changes no weight, so weights that give NaN would skip for ever. The
overflows of float16 while the loss scale is searched are different: their loss is
finite, and the minimum scale bounds them.
"""

import math
from collections.abc import Mapping

from zjax.config.schema import Precision
from zjax.errors import NonFiniteError, Problem

_LOWER = "lower optimizer.peak_learning_rate or look at the data"


class SkippedSteps:
    """Counts skipped steps in a row.

    Args:
        precision: Policy for such steps.
        num_steps: Steps of the whole run.
        num_skipped: Steps skipped so far.

    Example:
        >>> skipped = SkippedSteps(Precision(), num_steps=100, num_skipped=0)
        >>> bad = {"loss": math.nan, "grad_norm": math.nan, "skipped_steps": 1.0}
        >>> skipped.count(7, bad), skipped.in_a_row
        (True, 1)
        >>> skipped.count(8, {"loss": 2.5, "grad_norm": 1.0, "skipped_steps": 1.0})
        False
        >>> skipped.in_a_row
        0
    """

    def __init__(self, precision: Precision, *, num_steps: int, num_skipped: int):
        self._precision = precision
        self._num_steps = num_steps
        self._num_skipped = num_skipped
        self._first = 0, "", 0.0
        self.in_a_row = 0
        """Newest skipped steps in a row that a lower loss scale would not mend."""

    def count(self, step: int, values: Mapping[str, float]) -> bool:
        """Counts a step by its metrics; returns whether it was skipped."""
        total = int(values["skipped_steps"])
        is_new, self._num_skipped = total > self._num_skipped, total
        if not is_new:
            self.in_a_row = 0
        elif not self._is_scale_search(values):
            if not self.in_a_row:
                name = _cause(values)
                self._first = step, name, values[name]
            self.in_a_row += 1
        return is_new

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Raises if the run should end at this step, the one counted last.

        Raises:
            NonFiniteError: Names the first step in a row, and what was not finite.
        """
        policy, name = self._precision.on_nonfinite, _cause(values)
        if policy == "update":
            if name == "loss":
                problem = f"is not finite at step {step}, whose update was applied"
                remedy = f"go back to the last checkpoint, and {_LOWER}"
                raise NonFiniteError(Problem(name, values[name], problem, remedy))
            return
        if not self.in_a_row:
            return
        if policy == "stop":
            problem = f"is not finite at step {step}, whose update was not applied"
            if name == "skipped_steps":
                problem = f"at step {step}: gradients of a replica were not finite"
            raise NonFiniteError(Problem(name, values[name], problem, _LOWER))
        if values.get("loss_scale_spent"):
            minimum, remedy = self._precision.loss_scale.minimum, _LOWER
            problem = f"is the minimum and step {step} still overflows"
            if name == "loss":
                problem += f", whose loss is {values['loss']}"
            else:
                remedy = (
                    "use precision.compute_dtype='bfloat16' or a lower learning rate"
                )
            field = "precision.loss_scale.minimum"
            raise NonFiniteError(Problem(field, minimum, problem, remedy))
        is_all = step == self._num_steps == self._num_skipped
        if is_all or self.in_a_row >= self._precision.max_skipped_in_a_row:
            raise NonFiniteError(self._too_many(step, is_all))

    def _too_many(self, step: int, is_all: bool) -> Problem:
        first, name, value = self._first
        skipped = f"all {step} steps" if is_all else f"{self.in_a_row} steps in a row"
        problem = f"skipped {skipped}, starting with {name}={value} at step {first}"
        remedy = f"{_LOWER}; earlier checkpoints are unaffected"
        return Problem("precision.on_nonfinite", "skip", problem, remedy)

    def _is_scale_search(self, values: Mapping[str, float]) -> bool:
        """Whether a lower loss scale may cure the overflow of a step."""
        is_dynamic = "loss_scale" in values and self._precision.loss_scale.window > 0
        spent = values.get("loss_scale_spent", 0.0)
        return is_dynamic and math.isfinite(values["loss"]) and not spent


def _cause(values: Mapping[str, float]) -> str:
    """What was not finite; replicas that take local steps may have skipped earlier."""
    names = ("loss", "grad_norm")
    is_bad = (name for name in names if not math.isfinite(values.get(name, 0)))
    return next(is_bad, "skipped_steps")
