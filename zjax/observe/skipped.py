"""Steps that are not finite, or train nothing: which steps end the run, and why.

A skipped step changes no weight, so weights that give NaN would skip for ever.
Overflows of float16 while the loss scale is searched are different: the loss is finite,
and the minimum scale bounds the number of overflows.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from zjax.errors import NonFiniteError, Problem
from zjax.settings.schema import Precision

_LOWER = "lower optimizer.peak_learning_rate or look at the data"
_MASKS = "look at masks and weights of the data, or at sequence_warmup"


class SkippedSteps:
    """Counts skipped steps in a row.

    Args:
        precision: Settings, of which `on_nonfinite` says what ends the run.
        num_steps: Steps of the whole run.
        num_skipped: Skipped steps among the steps taken.
        last_step: Steps already taken.
        prefix: Beginning of the names of the metrics, for a second model.
    """

    def __init__(
        self,
        precision: Precision,
        *,
        num_steps: int,
        num_skipped: int,
        last_step: int = 0,
        prefix: str = "",
    ):
        self._precision, self._prefix = precision, prefix
        self._num_steps = num_steps
        self._num_skipped = num_skipped
        self._shared_step = last_step
        self._seen: _Cause | None = None
        """First step that was not finite since replicas shared metrics."""
        self._found: _Cause | None = None
        """Cause of the newest skipped or lost step, while no step was fine."""
        self._first = _Cause("", "", 0.0)
        self.in_a_row = 0
        """Newest skipped steps in a row that a lower loss scale would not cure."""

    def count(
        self, step: int, values: Mapping[str, float], *, is_shared: bool = True
    ) -> bool:
        """Counts a step by metrics; returns whether the step was skipped.

        Steps without shared metrics count with the next step that has shared metrics.
        """
        # The first cause explains later steps.
        self._seen = self._seen or _cause(step, values, self._prefix)
        if not is_shared:
            return False
        since, self._shared_step = step - self._shared_step, step
        seen, self._seen = self._seen, None
        total = int(values[f"{self._prefix}skipped_steps"])
        new, self._num_skipped = total - self._num_skipped, total
        if new <= 0:  # the policy `update` skips nothing
            self._found, self.in_a_row = seen, 0
            return False
        self._found = seen or _of_other_process(step, since, total)
        if self._is_scale_search(values):
            # No fault: the search finds the largest scale by overflows.
            self._found = None
        elif new < since:  # every replica took a step
            self.in_a_row = 0
        else:
            self._first = self._first if self.in_a_row else self._found
            self.in_a_row += new
        return True

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Raises if the run should end at this step, which was counted last."""
        policy, found = self._precision.on_nonfinite, self._found
        if found is None:
            return
        if policy == "update":
            # An infinite norm may be the sum of squares of finite gradients.
            if found.name == "loss" or math.isnan(found.value):
                problem = f"is not finite at {found.steps}, whose update was applied"
                remedy = f"go back to the last checkpoint, and {_LOWER}"
                raise NonFiniteError(Problem(found.name, found.value, problem, remedy))
            return
        if policy == "stop":
            problem = f"is not finite at {found.steps}, whose update was not applied"
            if found.name == "skipped_steps":
                problem = f"at {found.steps}: a replica took no step"
            if found.name == "weight":
                problem = f"at {found.steps}: the batch has nothing to train on"
            name, value = found.name, found.value
            raise NonFiniteError(Problem(name, value, problem, found.remedy))
        if values.get("loss_scale_spent"):
            minimum, remedy = self._precision.loss_scale.minimum, _LOWER
            problem = f"is the minimum and step {step} still overflows"
            if found.name == "loss":
                problem += f", whose loss is {found.value}"
            else:
                remedy = (
                    "use precision.compute_dtype='bfloat16' or a lower learning rate"
                )
            field = "precision.loss_scale.minimum"
            raise NonFiniteError(Problem(field, minimum, problem, remedy))
        # A run without any update must not pass as done.
        is_all = step == self._num_steps == self._num_skipped
        if is_all or self.in_a_row >= self._precision.max_skipped_in_a_row:
            raise NonFiniteError(self._too_many(step, is_all))

    def _too_many(self, step: int, is_all: bool) -> Problem:
        """Problem of a run with too many skipped steps, and the first cause."""
        first = self._first
        skipped = f"all {step} steps" if is_all else f"{self.in_a_row} steps in a row"
        cause = f"{first.name}={first.value} at {first.steps}"
        problem = f"skipped {skipped}, starting with {cause}"
        remedy = f"{first.remedy}; earlier checkpoints are unaffected"
        return Problem("precision.on_nonfinite", "skip", problem, remedy)

    def _is_scale_search(self, values: Mapping[str, float]) -> bool:
        """Whether a lower loss scale may cure the overflow of a step."""
        is_dynamic = "loss_scale" in values and self._precision.loss_scale.window > 0
        spent = values.get("loss_scale_spent", 0.0)
        of_gradients = self._found is None or self._found.name not in ("loss", "weight")
        return is_dynamic and of_gradients and not spent


class _Cause(NamedTuple):
    """Metric of a step that was not finite."""

    steps: str
    name: str
    value: float

    @property
    def remedy(self) -> str:
        """Advice on how to make such steps count."""
        return _MASKS if self.name == "weight" else _LOWER


def _cause(step: int, values: Mapping[str, float], prefix: str) -> _Cause | None:
    """Finds why a step was skipped; None for a finite step that trains something."""
    for name in (f"{prefix}loss", f"{prefix}grad_norm"):
        if not math.isfinite(values.get(name, 0)):
            return _Cause(f"step {step}", name, values[name])
    if values.get("weight") == 0:
        return _Cause(f"step {step}", "weight", 0.0)
    return None


def _of_other_process(step: int, since: int, total: int) -> _Cause:
    """Names the steps among which a replica of another process skipped some."""
    first = step - since + 1
    steps = f"step {step}" if since == 1 else f"one of steps {first} to {step}"
    return _Cause(steps, "skipped_steps", float(total))
