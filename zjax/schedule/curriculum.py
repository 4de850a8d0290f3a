"""Curriculum learning: checks of the pacing of difficulties, and weighted draws."""

import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from zjax.errors import Problem
from zjax.schedule.pacing import Pacing, metric_field, pacing_problems
from zjax.settings import schema

PERCENTILES = 100


def metric_name(metric: schema.CurriculumMetric) -> str:
    """Name of a difficulty in step metrics, after the file name of the index.

    Example:
        >>> metric_name(schema.CurriculumMetric(index="index/voc.index"))
        'difficulty_voc'
    """
    return f"difficulty_{pathlib.Path(metric.index).stem}"


def curriculum_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields problems of `curriculum` that show without the index files."""
    fields: dict[str, str] = {}
    for number, metric in enumerate(config.curriculum.metrics):
        field = metric_field(number)
        first = fields.setdefault(metric_name(metric), field)
        if first != field and metric.index:
            problem = f"has the name of {first}.index"
            remedy = "give each index once, in files of different names"
            yield Problem(f"{field}.index", metric.index, problem, remedy)
        if not metric.index:
            remedy = "give a file of `zjax data analyze`, such as 'index/voc.index'"
            yield Problem(f"{field}.index", "", "names no file", remedy)
        is_percentile = metric.difficulty == "percentile"
        yield from pacing_problems(
            f"{field}.pacing",
            metric.pacing,
            num_steps=config.num_steps,
            longest=("percentiles", PERCENTILES) if is_percentile else None,
        )


BLOCK_STEPS = 256
"""Number of steps that one random generator draws."""
_SUMS_KEPT = 8
"""Number of recent steps, and of recent blocks, with a cached sum."""
_MAX_DRAWS = 1 << 20
"""Most draws in memory at once, unless a single step has more."""


class Picked(NamedTuple):
    """Draws of one step."""

    parts: Int64[np.ndarray, " draws"]
    """Index of the part of each draw."""
    ordinals: Int64[np.ndarray, " draws"]
    """Number of earlier draws of the part, over all steps."""


class Picks:
    """Draws of parts with replacement, with probability proportional to weights.

    Args:
        key: Key of the random generators, such as a seed and a purpose.
        weights: Weight of each part, above 0.
        num_open: Number of parts, from the first on, that a step may draw; steps count
            from 1.
        num_draws: Number of draws of each step, 1 or more.

    Example:
        >>> from zjax.schedule.pacing import Pacing
        >>> picks = Picks((0,), np.ones(2), Pacing((0, 2), (1, 2)), num_draws=3)
        >>> [picks.at(0).parts.tolist(), picks.at(0).ordinals.tolist()]
        [[0, 0, 0], [0, 1, 2]]
    """

    def __init__(
        self,
        key: tuple[int, ...],
        weights: Float64[np.ndarray, " parts"],
        num_open: Pacing,
        num_draws: int,
    ):
        self._key, self._num_draws = key, num_draws
        self._ends = np.cumsum(weights, dtype=np.float64)
        self._firsts = np.array(num_open.firsts)
        self._num_open = np.array(num_open.values)
        self._before = {0: np.zeros(len(weights), np.int64)}

    def at(self, step: int) -> Picked:
        """Returns the draws of a step, counted from 0."""
        taken, parts = self._sum_before(step), self._draw(step, step + 1)[0]
        # Stable, so that equal parts stay in the order of the draws.
        order = np.argsort(parts, kind="stable")
        firsts = np.searchsorted(parts[order], parts[order])
        ordinals = np.empty_like(parts)
        ordinals[order] = np.arange(len(parts)) - firsts
        return Picked(parts, taken[parts] + ordinals)

    def first_parts(self, num_steps: int) -> Int64[np.ndarray, " steps"]:
        """Returns the part of the first draw of each of the first steps."""
        drawn = [self._draw(*ends)[:, 0] for ends in self._ranges(0, num_steps)]
        return np.concatenate(drawn)

    def _ranges(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Splits steps at blocks, and into ranges of at most `_MAX_DRAWS` draws."""
        most = max(1, _MAX_DRAWS // self._num_draws)
        while first < end:
            last = min(end, first + most, first - first % BLOCK_STEPS + BLOCK_STEPS)
            yield first, last
            first = last

    def _draw(self, first: int, end: int) -> Int64[np.ndarray, "steps draws"]:
        """Draws the parts of steps of one block."""
        numbers = np.arange(first, end) + 1  # pacings count steps from 1
        num_open = self._num_open[np.searchsorted(self._firsts, numbers, "right") - 1]
        block, place = divmod(first, BLOCK_STEPS)
        bits = np.random.PCG64([*self._key, block])
        # Jumps to the step: draws do not depend on the step where a reader starts.
        bits.advance(place * self._num_draws)  # a number takes one state
        points = np.random.Generator(bits).random((end - first, self._num_draws))
        # Uniform up to the summed weight of the open parts.
        points *= self._ends[num_open - 1][:, None]
        parts = np.searchsorted(self._ends, points, "right")
        return np.minimum(parts, num_open[:, None] - 1)  # where a product rounds up

    def _sum_before(self, step: int) -> Int64[np.ndarray, " parts"]:
        """Counts how often each part is drawn before a step."""
        known = dict(self._before)  # a copy: threads may replace the attribute
        nearest = max(number for number in known if number <= step)
        total = known[nearest]
        for first, end in self._ranges(nearest, step):
            drawn = self._draw(first, end).reshape(-1)
            total = total + np.bincount(drawn, minlength=len(total))
            known[end] = total
        near = [number for number in sorted(known) if number <= step]
        blocks = [number for number in near if number % BLOCK_STEPS == 0]
        # 0 stays, as every step needs a sum at or before the step.
        recent = {0, *near[-_SUMS_KEPT:], *blocks[-_SUMS_KEPT:]}
        # Replaced at once, never changed in place: other threads read it.
        self._before = {number: known[number] for number in recent}
        return total
