"""The training schedule: what each step of a run is, as a pure function of the step."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from zjax.schedule.buckets import bucket_lengths, bucket_rows
from zjax.schedule.dropping import metric_name, num_middle_layers
from zjax.schedule.exchange import StepExchange, make_exchanges
from zjax.schedule.learning_rate import make_schedule
from zjax.schedule.lengths import CUTS, in_steps, make_shapes, make_tokens
from zjax.schedule.pacing import Pacing, make_pacing
from zjax.settings import schema
from zjax.typing import ATTENTION_WINDOW

_SEARCHED_STEPS = 10_000
"""Most steps that are searched for the first batch of each bucket."""


class Told(NamedTuple):
    """What a teacher tells of its layers in a step."""

    states: bool = False
    """Whether the streams of layers."""
    heads: bool = False
    """Whether queries and keys of layers."""


NOTHING = Told()


class ScheduledStep(NamedTuple):
    """Sizes and probabilities of one training step."""

    rows: int
    length: int
    num_kept: int
    """Tokens of each row that middle layers run on, `length` or fewer."""
    has_teacher: bool
    told: Told
    """What the teacher also tells of layers."""
    window: int | None
    """Number of keys that a token sees; None for all."""
    theta: float | None
    """Probability that the last layer runs; None if all layers run."""
    exchange: StepExchange
    """What replicas exchange in the step, and the programs of the step."""

    @property
    def static(self) -> tuple[int, int, int, bool, Told]:
        """Values that decide the program: steps with other values compile another."""
        return self[:5]

    @property
    def traced(self) -> dict[str, float]:
        """Values that the model reads by name; one program runs with all of them."""
        return {} if self.window is None else {ATTENTION_WINDOW: float(self.window)}


class TrainingSchedule:
    """Shapes, dropped tokens and layers, exchanges and learning rates, by step from 1.

    Args:
        shape_at: Function from a step to the rows and the tokens per row of the batch,
            if the order of the data decides both, as with length buckets.

    Reference:
        Li et al., The Stability-Efficiency Dilemma (arXiv:2108.06084), section 4.1;
        Zhu et al., SkyLadder (arXiv:2503.15450), section 3; Yao et al., Random-LTD
        (arXiv:2211.11586), section 3.2; Zhang and He, Progressive Layer Dropping
        (arXiv:2010.13369), section 4.2.
    """

    def __init__(
        self,
        config: schema.Config,
        num_devices: int = 1,
        shape_at: Callable[[int], tuple[int, int]] | None = None,
    ):
        self.config, self._num_devices = config, num_devices
        self.tokens = make_tokens(config)
        """Tokens of each batch."""
        self.exchanges = make_exchanges(config)
        """What replicas exchange in each step."""
        warmup, dropping = config.sequence_warmup, config.random_ltd
        shapes = make_shapes(config)
        # A pacing begins at step 0; shapes count from 1.
        firsts = (0, *list(shapes)[1:])
        rows, lengths = zip(*shapes.values(), strict=True)
        self._rows, self._lengths = Pacing(firsts, rows), Pacing(firsts, lengths)
        self._windows = self._kept = None
        if isinstance(warmup, schema.Window):
            self._windows = make_pacing(in_steps(config, warmup.pacing))
        if dropping:
            self._kept = make_pacing(in_steps(config, dropping.pacing))
        distill, num_steps = config.distill, config.num_steps
        self.num_taught = distill.num_steps(num_steps) if distill else 0
        """First steps in which a teacher adds to the loss."""
        hidden = distill.hidden if distill else None
        self._last_states = hidden.num_steps(num_steps) if hidden else 0
        maps = distill.attention if distill else None
        self._last_heads = maps.num_steps(num_steps) if maps else 0
        self._counted = 0, 0
        self._shape_at = None
        self._changes = self._static_changes()
        # Set last: changes between buckets are searched where they are needed.
        self._shape_at = shape_at

    @functools.cached_property
    def learning_rate(self) -> Callable[[int], Any]:
        """Learning rate by the number of applied steps."""
        return make_schedule(self.config)

    @property
    def drops_span(self) -> bool:
        """Whether middle layers that drop tokens run on one subset together."""
        return isinstance(self.config.random_ltd, schema.Span)

    @property
    def drops(self) -> bool:
        """Whether any step drops tokens or layers."""
        return self._kept is not None or self.config.layer_drop is not None

    @property
    def adds_inputs(self) -> bool:
        """Whether models read values of the step beside the batch."""
        return self.drops or self._windows is not None

    @property
    def has_buckets(self) -> bool:
        """Whether the order of the data decides the tokens per row."""
        return self.config.buckets is not None

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Rows and tokens per row of all batches, the shortest rows first."""
        values = self._rows.values, self._lengths.values
        if buckets := self.config.buckets:
            lengths = bucket_lengths(buckets.shortest, self.config.data.length)
            values = bucket_rows(lengths, self.config.global_batch_size), lengths
        return tuple(zip(*values, strict=True))

    def at(self, step: int, length: int | None = None) -> ScheduledStep:
        """Returns the values of a step, by default for the scheduled tokens per row."""
        rows, scheduled = self._rows.at(step), self._lengths.at(step)
        if self._shape_at is not None:
            rows, scheduled = self._shape_at(step)
        length = length or scheduled
        # The paper counts steps from 0.
        num_kept = min(length, self._kept.at(step - 1)) if self._kept else length
        return ScheduledStep(
            rows,
            length,
            num_kept,
            step <= self.num_taught,
            Told(step <= self._last_states, step <= self._last_heads),
            self._windows.at(step) if self._windows else None,
            self._theta(step),
            self.exchanges.at(step),
        )

    def _theta(self, step: int) -> float | None:
        """Probability that the last layer runs; None if all layers run."""
        if not (drop := self.config.layer_drop):
            return None
        rate = drop.rate(self.config.num_steps)
        # The paper counts steps from 0.
        return drop.theta + (1 - drop.theta) * math.exp(-rate * (step - 1))

    def changes(self, after: int) -> Iterator[range]:
        """Yields the steps of each new program after step `after`, in order.

        A range begins with the first step whose static values no step from `after` on
        had. It ends before the next change, or with the run if lengths come back.
        """
        end_of_run = self.config.num_steps + 1
        seen = {self.at(after).static}
        later = (step for step in self._changes if step > after + 1)
        for first, end in itertools.pairwise([after + 1, *later, end_of_run]):
            # Between two changes, buckets alone differ from step to step.
            most = _SEARCHED_STEPS if self.has_buckets else 1
            found = set()
            for step in range(first, min(end, first + most)):
                found.add(static := self.at(step).static)
                if static not in seen:
                    seen.add(static)
                    yield range(step, end_of_run if self.has_buckets else end)
                if len(found) == len(self.shapes):
                    break

    def values(self, step: int) -> dict[str, float]:
        """Returns the metrics of a step that the schedule decides, by name."""
        values = {"consumed_tokens": float(self.tokens.sum_until(step))}
        scheduled = self.at(step)
        if isinstance(self.config.sequence_warmup, CUTS) or self._shape_at is not None:
            values["sequence_length"] = float(scheduled.length)
        values |= scheduled.traced | self.dropping_values(step)
        # With buckets, the data alone decide the lengths.
        if self._kept and (self._shape_at is not None or not self.has_buckets):
            values["consumed_layer_tokens"] = float(self._consumed_layer_tokens(step))
        return values

    def dropping_values(self, step: int) -> dict[str, float]:
        """Returns the metrics of dropped tokens and layers of a step, by name."""
        scheduled = self.at(step)
        values = {"kept_tokens": float(scheduled.num_kept)} if self._kept else {}
        if scheduled.theta is not None:
            values["layer_drop_theta"] = scheduled.theta
        return values

    def planned(self, step: int) -> dict[str, float]:
        """Returns learning rate, metrics and difficulties of a step that skips none."""
        # The optimizer counts updates from 0.
        values = {"learning_rate": float(self.learning_rate(step - 1))}
        values |= self.values(step)
        return values | {n: float(x.at(step)) for n, x in self._difficulties.items()}

    @functools.cached_property
    def _difficulties(self) -> dict[str, Pacing]:
        """Pacing of each difficulty by the name of the metric."""
        return {
            metric_name(metric): make_pacing(in_steps(self.config, metric.pacing))
            for metric in self.config.curriculum.metrics
            # A growth without an end takes the last value from the index file.
            if not isinstance(metric.pacing, schema.Growing) or metric.pacing.end
        }

    def is_partial(self, step: int) -> bool:
        """Whether a step leaves out layers, or tokens that a token could see."""
        scheduled, full = self.at(step), self.config.data.length
        seen = min(scheduled.window or full, scheduled.num_kept)
        return seen < full or self.has_buckets or scheduled.theta is not None

    def _consumed_layer_tokens(self, step: int) -> int:
        """Sums the tokens of all layers in the steps up to `step`."""
        middle = num_middle_layers(self.config, self._num_devices)
        num_whole = self.config.model.num_layers - middle

        def tokens_at(step: int) -> int:
            rows, length, num_kept, *_ = self.at(step)
            return rows * (length * num_whole + num_kept * middle)

        # The sum of an earlier call goes on; a caller may also go back.
        known, total = self._counted if self._counted[0] <= step else (0, 0)
        later = (first for first in self._changes if known + 1 < first <= step)
        for first, end in itertools.pairwise([known + 1, *later, step + 1]):
            if self.has_buckets:
                total += sum(map(tokens_at, range(first, end)))
            else:
                total += (end - first) * tokens_at(first)
        self._counted = step, total
        return total

    def _static_changes(self) -> list[int]:
        """Lists step 1 and the steps whose static values differ from the step before.

        Lengths of buckets do not count.
        """
        kept = self._kept.firsts if self._kept else ()
        firsts = {1, *self._rows.firsts[1:], *(first + 1 for first in kept)}
        firsts |= {self.num_taught + 1, self._last_states + 1, self._last_heads + 1}
        in_run = sorted(first for first in firsts if first <= self.config.num_steps)
        return [
            first
            for first in in_run
            if first == 1 or self.at(first).static != self.at(first - 1).static
        ]
