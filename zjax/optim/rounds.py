"""Rounds of local steps: when replicas exchange which fragment of their parameters.

Every `num_local_steps` steps each fragment is merged once, at evenly spaced steps, the
last fragment at the end of the round. A fragment is sent `delay` steps before its
merge.
"""

import dataclasses

from zjax.optim.zero_one_adam import (
    APART,
    LOCAL,
    Intervals,
    make_intervals,
)
from zjax.settings.schema import Config, ZeroOneAdam

SYNCHRONOUS = "synchronous"
"""The phase of steps in which replicas exchange gradients, before local ones."""


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The schedule of exchanges of a run with local steps.

    Args:
        num_local_steps: Steps of a round, 1 or more.
        num_fragments: Number of fragments of the parameters, 1 to `num_local_steps`.
        delay: Steps from sending to merging, fewer than between two merges.
        num_synchronous_steps: Steps before the first round.

    Example:
        >>> rounds = Rounds(num_local_steps=4, num_fragments=2, delay=1)
        >>> [rounds.sent_after(step) for step in range(1, 9)]
        [0, None, 1, None, 0, None, 1, None]
        >>> [rounds.merged_after(step) for step in range(1, 9)]
        [None, 0, None, 1, None, 0, None, 1]

    Reference:
        Streaming DiLoCo, arXiv:2501.18512, sections 2.1 and 2.2.
    """

    num_local_steps: int
    num_fragments: int = 1
    delay: int = 0
    num_synchronous_steps: int = 0

    def at(self, step: int) -> str:
        """Returns the phase of a step, 1 or more."""
        return LOCAL if self._local(step) > 0 else SYNCHRONOUS

    def merged_after(self, step: int) -> int | None:
        """Returns the fragment to merge after a step, 1 or more; None for no merge."""
        length, number = self.num_local_steps, self.num_fragments
        # The last fragment ends at `length`, which is 0 modulo the round.
        ends = ((i + 1) * length // number % length for i in range(number))
        local = self._local(step)
        if local <= 0:
            return None
        return next((i for i, end in enumerate(ends) if local % length == end), None)

    def sent_after(self, step: int) -> int | None:
        """Returns the fragment to send after a step, 1 or more; None for no send."""
        return self.merged_after(step + self.delay)

    def ends_after(self, step: int) -> bool:
        """Whether a step is the last one of a round."""
        local = self._local(step)
        return local > 0 and local % self.num_local_steps == 0

    def forgets_errors_after(self, step: int) -> bool:
        """Whether the error feedback is reset after a step; never here."""
        return False

    def _local(self, step: int) -> int:
        return step - self.num_synchronous_steps


def shares_metrics(step: int, rounds: Rounds | Intervals | None) -> bool:
    """Whether every replica holds the metrics of all replicas after a step.

    Example:
        >>> rounds = Rounds(num_local_steps=30)
        >>> shares_metrics(29, None), shares_metrics(29, rounds)
        (True, False)
        >>> shares_metrics(30, rounds)
        True
    """
    if rounds is None or rounds.at(step) not in APART:
        return True
    return rounds.ends_after(step)


def make_rounds(config: Config) -> Rounds | Intervals | None:
    """Returns the schedule of exchanges; None if replicas never step apart.

    Args:
        config: Config; reads `communication`, `optimizer` and `num_steps`.

    Example:
        >>> from zjax.settings import schema
        >>> rounds = schema.LocalSteps(num_steps=30)
        >>> settings = schema.Communication(local_steps=rounds)
        >>> make_rounds(Config(communication=settings)).merged_after(60)
        0
    """
    if isinstance(rule := config.optimizer.rule, ZeroOneAdam):
        return make_intervals(rule, config.num_steps)
    if (settings := config.communication.local_steps) is None:
        return None
    return Rounds(
        settings.num_steps,
        settings.num_fragments,
        settings.delay,
        settings.num_synchronous_steps,
    )
