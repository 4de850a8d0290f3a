"""What replicas exchange in each step of a run, and the programs of a step by name."""

import collections
import dataclasses
import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

from zjax.settings.schema import Compressed, Config, ZeroOneAdam

TRAIN, SYNCHRONOUS = "train", "synchronous"
WARM_UP, COMPRESSED = "warm_up", "compressed"
VARIANCE, ONE_BIT, LOCAL, MERGED = "variance", "one_bit", "local", "merged"
_WARM_UP_SHARE = 0.15
"""Share of the steps of a run that warm up, if `freeze_step` is 0."""


class Phase(NamedTuple):
    """One way to take a step.

    Args:
        name: Name of the phase, which rules of compressed messages read.
        message: What the program of the step averages over replicas: gradients, the
            steps of the optimizer, or nothing.
        codec: Name of the wire format, of `zjax.ops.codecs`; `none` if the compiler
            reduces gradients.
    """

    name: str
    message: Literal["gradients", "steps", "nothing"]
    codec: str = "none"

    @property
    def program(self) -> str:
        """Name of the program that reads the batch of the step."""
        # LOCAL and MERGED steps run one program; the exchange afterwards differs.
        return TRAIN if self.message == "nothing" else self.name


class StepExchange(NamedTuple):
    """What replicas exchange in one step.

    Args:
        sent: Fragment of the parameters that is sent after the step, or None.
        merged: Fragment that is merged after the step, or None.
        ends_round: Whether the step is the last one of a round of local steps.
        resets_errors: Whether the error feedback starts again at 0 after the step.
    """

    phase: Phase
    sent: int | None = None
    merged: int | None = None
    ends_round: bool = False
    resets_errors: bool = False

    @property
    def programs(self) -> tuple[str, ...]:
        """Names of the programs of the step, in starting order."""
        names = [self.phase.program]
        if self.sent is not None:
            names += f"outer_gradients_{self.sent}", f"mean_{self.sent}"
        if self.merged is not None:
            names.append(f"merge_{self.merged}")
        if self.ends_round:
            names.append("end_of_round")
        if self.resets_errors:
            names.append("without_errors")
        return tuple(names)

    @property
    def shares_metrics(self) -> bool:
        """Whether every replica holds the metrics of all replicas after the step."""
        return self.phase.message != "nothing" or self.ends_round


_COMPRESSED, _ONE_BIT = (Phase(x, "steps", "onebit") for x in (COMPRESSED, ONE_BIT))
_LOCAL, _MERGED = Phase(LOCAL, "nothing"), Phase(MERGED, "nothing")
"""Phases in which a replica trains on local gradients; after a step of `_MERGED`, 0/1
Adam merges the replicas."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchanges:
    """The exchanges of a run; here of one whose replicas send a message in every step.

    Args:
        phases: All phases of the run; the last one begins after the freeze.
        freeze_step: Last step that may update second moments; 0 if all steps may.
        outer_codec: Wire format of the outer gradients of fragments; None if replicas
            never step apart.
        outer_phase: Phase in which the optimizer of the replicas takes outer steps, or
            None.
        delay: Steps from sending to merging, fewer than between two merges.
    """

    phases: tuple[Phase, ...] = (Phase(TRAIN, "gradients"),)
    freeze_step: int = 0
    outer_codec: str | None = None
    outer_phase: Phase | None = None
    num_fragments: int = 1
    delay: int = 0

    @property
    def sending(self) -> tuple[Phase, ...]:
        """Phases whose program averages a message by codec."""
        return tuple(phase for phase in self.phases if phase.codec != "none")

    @property
    def steps_apart(self) -> bool:
        """Whether replicas take steps without any exchange."""
        return self.outer_codec is not None

    def at(self, step: int) -> StepExchange:
        """Returns the exchange of a step, 1 or more."""
        return StepExchange(self.phases[-1 if step > self.freeze_step else 0])

    def count_programs(self, num_steps: int) -> collections.Counter[str]:
        """Counts how often each program starts in a run."""
        return collections.Counter(
            program
            for step in range(1, num_steps + 1)
            for program in self.at(step).programs
        )

    def batch_programs(self, steps: Iterable[int]) -> list[str]:
        """Lists the programs that read the batches of steps, in order of first use."""
        return [*dict.fromkeys(self.at(step).phase.program for step in steps)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds(Exchanges):
    """The exchanges of a run with rounds of local steps, as in DiLoCo.

    Args:
        num_local_steps: Steps of a round, `num_fragments` or more.
        num_synchronous_steps: Steps before the first round, which take the first phase.

    Example:
        >>> rounds = Rounds(num_local_steps=4, num_fragments=2, delay=1)
        >>> [rounds.at(step).sent for step in range(1, 9)]
        [0, None, 1, None, 0, None, 1, None]
        >>> [rounds.at(step).merged for step in range(1, 9)]
        [None, 0, None, 1, None, 0, None, 1]
        >>> for step in (2, 3, 4):
        ...     print(step, *rounds.at(step).programs)
        2 train merge_0
        3 train outer_gradients_1 mean_1
        4 train merge_1 end_of_round

    Reference:
        Streaming DiLoCo, arXiv:2501.18512, sections 2.1 and 2.2.
    """

    phases: tuple[Phase, ...] = (_LOCAL,)
    outer_codec: str | None = "float32"
    num_local_steps: int
    num_synchronous_steps: int = 0

    def at(self, step: int) -> StepExchange:
        """Returns the exchange of a step, 1 or more."""
        local = step - self.num_synchronous_steps
        return StepExchange(
            self.phases[-1 if local > 0 else 0],
            # A fragment may be sent before the first round, `delay` steps ahead.
            self._merged_at(local + self.delay),
            self._merged_at(local),
            ends_round=local > 0 and local % self.num_local_steps == 0,
        )

    def _merged_at(self, local: int) -> int | None:
        """Returns the fragment that is merged after a local step, or None."""
        length, number = self.num_local_steps, self.num_fragments
        # The last fragment ends at `length`, which is 0 modulo the round.
        ends = ((i + 1) * length // number % length for i in range(number))
        if local <= 0:
            return None
        return next((i for i, end in enumerate(ends) if local % length == end), None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Intervals(Exchanges):
    """The exchanges of 0/1 Adam: gradients for second moments, steps, then distances.

    Local steps begin after `freeze_step`, which is `var_freeze_step` + 1 in DeepSpeed.

    Args:
        var_update_scaler: Updates of second moments until their interval doubles.
        local_step_scaler: Local steps until the interval between exchanges doubles.
        local_step_clipper: Longest interval between exchanges, in steps.

    Example:
        >>> intervals = Intervals(
        ...     phases=zero_one_phases("float32"), num_steps=20, freeze_step=11,
        ...     var_update_scaler=4, local_step_scaler=3, local_step_clipper=4,
        ... )
        >>> names = [intervals.at(step).phase.name for step in range(1, 21)]
        >>> [step for step, name in enumerate(names, start=1) if name == VARIANCE]
        [1, 2, 3, 4, 6, 8, 10]
        >>> [step for step, name in enumerate(names, start=1) if name == MERGED]
        [12, 13, 14, 16, 20]

    Reference:
        0/1 Adam, arXiv:2202.06009, section 4; intervals as in DeepSpeed.
    """

    outer_codec: str | None = "onebit"
    outer_phase: Phase | None = _MERGED
    num_steps: int
    var_update_scaler: int
    local_step_scaler: int
    local_step_clipper: int

    def at(self, step: int) -> StepExchange:
        """Returns the exchange of a step, 1 or more."""
        variance, one_bit, local, merged = self.phases
        if step > self.freeze_step:
            if not self._merges_at(step):
                return StepExchange(local)
            return StepExchange(merged, sent=0, merged=0, ends_round=True)
        skips_variance = step % self._variance_interval(step)
        # At the end of ONE_BIT steps messages change from steps to distances, for which
        # the old errors are meaningless.
        resets = step == self.freeze_step
        return StepExchange(
            one_bit if skips_variance else variance, resets_errors=resets
        )

    def _merges_at(self, step: int) -> bool:
        """Whether replicas merge after a step beyond the freeze."""
        # Beyond 64 doublings any interval is clipped.
        doublings = min((step - self.freeze_step - 1) // self.local_step_scaler, 64)
        interval = min(self.local_step_clipper, 2**doublings)
        # The last step exchanges, so that a run ends with shared parameters.
        return step % interval == 0 or step == self.num_steps

    def _variance_interval(self, step: int) -> int:
        """Returns the interval between updates of second moments at a step."""
        interval, last = 1, 0
        while True:
            # Each interval serves for `var_update_scaler` updates, then doubles.
            last = (last // interval + self.var_update_scaler) * interval
            if step <= last:
                return interval
            interval *= 2


def zero_one_phases(codec: str) -> tuple[Phase, ...]:
    """Returns the phases of 0/1 Adam; `codec` sends the gradients of second moments."""
    return Phase(VARIANCE, "gradients", codec), _ONE_BIT, _LOCAL, _MERGED


def make_exchanges(config: Config) -> Exchanges:
    """Returns the exchanges of a run.

    Args:
        config: Config; reads `communication`, `optimizer`, `precision` and `num_steps`.
    """
    codec, rule = config.communication.codec, config.optimizer.rule
    # The codec in whose dtype the compiler would reduce gradients.
    precision = config.precision
    is_wide = "float32" in (precision.reduce_dtype, precision.compute_dtype)
    uncompressed = "float32" if is_wide else "bfloat16"
    full_precision = uncompressed if codec == "none" else codec
    if isinstance(rule, Compressed):
        last = rule.freeze_step or math.ceil(_WARM_UP_SHARE * config.num_steps)
        if not isinstance(rule, ZeroOneAdam):
            phases = Phase(WARM_UP, "gradients", full_precision), _COMPRESSED
            return Exchanges(phases=phases, freeze_step=last)
        return Intervals(
            phases=zero_one_phases(full_precision),
            num_steps=config.num_steps,
            freeze_step=last,
            var_update_scaler=rule.var_update_scaler,
            local_step_scaler=rule.local_step_scaler or last,
            local_step_clipper=rule.local_step_clipper,
        )
    if (settings := config.communication.local_steps) is None:
        return Exchanges(phases=(Phase(TRAIN, "gradients", codec),))
    synchronous = Phase(SYNCHRONOUS, "gradients", uncompressed)
    return Rounds(
        phases=(synchronous,) * bool(settings.num_synchronous_steps) + (_LOCAL,),
        num_local_steps=settings.num_steps,
        num_fragments=settings.num_fragments,
        delay=settings.delay,
        num_synchronous_steps=settings.num_synchronous_steps,
        outer_codec="float32" if codec == "none" else codec,
    )
