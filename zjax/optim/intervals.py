"""Which steps of 0/1 Adam send what: intervals that grow between exchanges.

Until `freeze_step` second moments follow full gradients at steps whose interval grows,
and steps between send gradients in one bit per number. Then replicas take local steps,
and send how far they moved at steps whose interval grows.
"""

import dataclasses

from zjax.config.schema import Config
from zjax.optim.onebit_adam import freeze_step

ZERO_ONE_ADAM = "zero_one_adam"
VARIANCE, ONE_BIT, LOCAL, MERGED = "variance", "one_bit", "local", "merged"
APART = LOCAL, MERGED
"""Phases of steps; replicas take those of `APART` by themselves, and meet after a
`MERGED` one."""


@dataclasses.dataclass(frozen=True)
class Intervals:
    """The schedule of a run; its steps are 1 or more.

    Args:
        num_steps: Steps of the run, the last of which ends with an exchange.
        freeze_step: Last step before local steps; `var_freeze_step` + 1 in DeepSpeed.
        var_update_scaler: Updates of second moments until their interval doubles.
        local_step_scaler: Local steps until the interval between exchanges doubles.
        local_step_clipper: Longest interval between exchanges.

    Example:
        >>> intervals = Intervals(20, 11, 4, 3, 4)
        >>> [step for step in range(1, 21) if intervals.at(step) == VARIANCE]
        [1, 2, 3, 4, 6, 8, 10]
        >>> [step for step in range(1, 21) if intervals.at(step) == MERGED]
        [12, 13, 14, 16, 20]

    Reference:
        0/1 Adam, arXiv:2202.06009, section 4; intervals as in DeepSpeed.
    """

    num_steps: int
    freeze_step: int
    var_update_scaler: int
    local_step_scaler: int
    local_step_clipper: int

    def at(self, step: int) -> str:
        """The phase of a step."""
        if step > self.freeze_step:
            return MERGED if self.ends_after(step) else LOCAL
        return ONE_BIT if step % self._variance_interval(step) else VARIANCE

    def sent_after(self, step: int) -> int | None:
        """The fragment that is sent after a step: 0, all parameters, or None."""
        return 0 if self.ends_after(step) else None

    def merged_after(self, step: int) -> int | None:
        """The fragment that is merged after a step: 0, all parameters, or None."""
        return self.sent_after(step)

    def ends_after(self, step: int) -> bool:
        """Whether replicas meet after a local step."""
        number = step - self.freeze_step
        if number <= 0:
            return False
        # Beyond 64 doublings any interval is clipped.
        doublings = min((number - 1) // self.local_step_scaler, 64)
        interval = min(self.local_step_clipper, 2**doublings)
        return step % interval == 0 or step == self.num_steps

    def forgets_errors_after(self, step: int) -> bool:
        """Whether what the codec lost is of no use for later messages."""
        return step == self.freeze_step

    def _variance_interval(self, step: int) -> int:
        interval, last = 1, 0
        while True:
            last = (last // interval + self.var_update_scaler) * interval
            if step <= last:
                return interval
            interval *= 2


def make_intervals(config: Config) -> Intervals:
    """The schedule of a run with 0/1 Adam.

    Args:
        config: Read for `optimizer` and `num_steps`.

    Example:
        >>> make_intervals(Config(num_steps=1000)).local_step_scaler
        150
    """
    settings, last = config.optimizer, freeze_step(config)
    return Intervals(
        config.num_steps,
        last,
        settings.var_update_scaler,
        settings.local_step_scaler or last,
        settings.local_step_clipper,
    )
