"""Curriculum sampling: easy samples first, by indexes of difficulty.

At each new difficulty the newly admitted samples form a cluster. A batch draws clusters
in proportion to the number of samples, and takes the next samples of each cluster in
shuffled order.

The reference draws from one generator in order; a checkpoint would have to save the
state of the generator and files of clusters. Here each cluster is shuffled by a
permutation of (seed, cluster, epoch), and each block of steps draws by a generator of
(seed, block). A batch is a pure function of (seed, step): the distribution equals the
reference, the numbers differ.

Reference: Li et al., DeepSpeed Data Efficiency (arXiv:2212.03597), section 3.1.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int64

from zjax.data.draws import permute_parts
from zjax.data.metric_index import Index, open_index
from zjax.data.metrics import MAX_EXACT
from zjax.errors import ConfigError, DataError, Problem
from zjax.schedule.dropping import Picks, metric_name
from zjax.schedule.lengths import in_steps
from zjax.schedule.pacing import (
    Pacing,
    make_pacing,
    metric_field,
    pacing_problems,
    settings_read,
)
from zjax.settings import schema

_CLUSTERS, _DRAWS = 1, 2
"""Domains of random numbers, so that draws for different purposes are independent."""


@dataclasses.dataclass(frozen=True)
class Difficulty:
    """Samples sorted by a metric, and the difficulty that each step admits.

    Args:
        index: Samples from the easiest to the hardest.
        pacing: Difficulty by step, from 1 on.
        is_percentile: Whether a difficulty is a percentile, not a value.
    """

    index: Index
    pacing: Pacing
    is_percentile: bool

    def num_admitted(self, step: int) -> int:
        """Counts the samples that a step, from 1 on, admits."""
        difficulty = self.pacing.at(step)
        if self.is_percentile:
            return self.index.num_admitted_percentile(difficulty)
        return self.index.num_admitted(difficulty)


class Clusters:
    """Samples in the order of admission; pickled as the difficulties.

    Args:
        difficulties: One or more; all must admit a sample.
    """

    samples: Int64[np.ndarray, " n"]
    """Numbers of samples, cluster by cluster."""
    ends: Int64[np.ndarray, " clusters"]
    """End of each cluster in `samples`; none is empty."""
    firsts: tuple[int, ...]
    """First step of each cluster, from 1 on."""

    def __init__(self, difficulties: Sequence[Difficulty]):
        self._difficulties = difficulties
        steps = sorted({step for d in difficulties for step in d.pacing.changes()})
        counts = [[d.num_admitted(step) for step in steps] for d in difficulties]
        if len(difficulties) == 1:
            # The index is in the order of admission: samples stay mapped.
            self.samples, ends = difficulties[0].index.samples, np.array(counts[0])
        else:
            # Phase of a sample: number of the first step that admits it by all metrics.
            phases = np.zeros(len(difficulties[0].index.samples), np.int64)
            for difficulty, admitted in zip(difficulties, counts, strict=True):
                places = np.arange(len(phases))
                of_place = np.searchsorted(admitted, places, "right")
                samples = difficulty.index.samples
                phases[samples] = np.maximum(phases[samples], of_place)
            # Stable: the order within a cluster must not depend on the platform.
            self.samples = np.argsort(phases, kind="stable")
            # Samples that no step admits have the phase len(steps), and are cut off.
            ends = np.cumsum(np.bincount(phases, minlength=len(steps))[: len(steps)])
        is_new = np.diff(ends, prepend=0) > 0
        self.ends = ends[is_new]
        self.firsts = tuple(np.array(steps)[is_new].tolist())

    # Workers map the index files instead of receiving the samples.
    def __reduce__(self):
        return Clusters, (self._difficulties,)


class CurriculumSampler:
    """Samples of the global batch of each step."""

    def __init__(self, seed: int, clusters: Clusters, global_batch_size: int):
        self._seed, self._clusters = seed, clusters
        self._sizes = np.diff(clusters.ends, prepend=0)
        num_open = range(1, len(clusters.firsts) + 1)
        self._picks = Picks(
            (seed, _DRAWS),
            self._sizes.astype(np.float64),
            # A pacing begins at 0, where the first cluster is open in any case.
            Pacing((0, *clusters.firsts[1:]), tuple(num_open)),
            global_batch_size,
        )

    def indices(self, step: int) -> Int64[np.ndarray, " B"]:
        """Samples of one step, from 0 on, in batch order."""
        clusters, ordinals = self._picks.at(step)
        epochs, places = np.divmod(ordinals, self._sizes[clusters])
        pairs, which = _unique_pairs(clusters, epochs)
        keys = [(self._seed, _CLUSTERS, *pair) for pair in pairs.tolist()]
        rows = permute_parts(places, which, self._sizes[pairs[:, 0]], keys)
        starts = self._clusters.ends[clusters] - self._sizes[clusters]
        return self._clusters.samples[starts + rows]


def _unique_pairs(
    some: Int64[np.ndarray, " n"], others: Int64[np.ndarray, " n"]
) -> tuple[Int64[np.ndarray, "pairs 2"], Int64[np.ndarray, " n"]]:
    """Distinct pairs of numbers of 0 or more, and the pair number of each element."""
    span = int(others.max()) + 1
    found, which = np.unique(some * span + others, return_inverse=True)
    return np.stack(np.divmod(found, span), axis=1), which


class Curriculum:
    """The curriculum of a run: sampler, metrics, and the position for resuming.

    Args:
        digest: Digest of the samples; see `zjax.data.source.digest_samples`.

    Raises:
        DataError: An index is missing, damaged, of another dataset, or holds values
            that are not finite or too large.
        ConfigError: A difficulty does not fit the values of the index, or admits no
            sample in step 1.
    """

    def __init__(self, config: schema.Config, digest: str):
        metrics = config.curriculum.metrics
        self._difficulties = [
            _open_difficulty(
                number,
                metric,
                digest,
                in_steps(config, metric.pacing),
                config.num_steps,
            )
            for number, metric in enumerate(metrics)
        ]
        self._names = [metric_name(metric) for metric in metrics]
        clusters = Clusters(self._difficulties)
        # A slice, as no step at all may admit a sample.
        if clusters.firsts[:1] != (1,):
            num, names = (
                len(clusters.samples),
                [d.index.metric for d in self._difficulties],
            )
            problem = f"admits none of {num} samples in step 1 by {' and '.join(names)}"
            remedy = "start at a higher difficulty"
            start = self._difficulties[0].pacing.start
            raise ConfigError(
                Problem(f"{metric_field(0)}.pacing.start", start, problem, remedy)
            )
        size = config.global_batch_size
        self.sampler = CurriculumSampler(config.seed, clusters, size)
        names = [difficulty.index.metric for difficulty in self._difficulties]
        self.position: dict[str, Any] = {"curriculum.metrics": names}
        """Settings and checksums that determine the order, compared at resume."""
        for number, metric in enumerate(metrics):
            field, index = metric_field(number), self._difficulties[number].index
            self.position |= settings_read(f"{field}.pacing", metric.pacing)
            self.position |= {
                f"{field}.index": f"{index.metric} {index.checksum:08x}",
                f"{field}.difficulty": metric.difficulty,
            }

    def values(self, step: int) -> dict[str, float]:
        """Difficulty of each metric in a step, from 1 on."""
        return {
            name: float(difficulty.pacing.at(step))
            for name, difficulty in zip(self._names, self._difficulties, strict=True)
        }


def _open_difficulty(
    number: int,
    metric: schema.CurriculumMetric,
    digest: str,
    pacing: schema.Pacing,
    num_steps: int,
) -> Difficulty:
    """Opens the index of a metric and makes the pacing, whose steps are known."""
    field = metric_field(number)
    index = open_index(metric.index, digest, field=f"{field}.index")
    # NaN is sorted to the end.
    extremes = float(index.values[0]), float(index.values[-1])
    for value in extremes:
        if not math.isfinite(value):
            problem = f"holds {value} as a value of {index.metric}"
            remedy = "measure finite numbers, by `zjax data analyze`"
            raise DataError(Problem(f"{field}.index", metric.index, problem, remedy))
    is_percentile = metric.difficulty == "percentile"
    # An end of 0 stands for the largest value of the index.
    grows = isinstance(pacing, schema.Growing)
    if grows and not is_percentile and pacing.end == 0:
        if extremes[1] > MAX_EXACT:
            problem = f"holds {extremes[1]} as a value of {index.metric}, above the "
            problem += f"{MAX_EXACT:,} up to which a difficulty grows exactly"
            remedy = f"use {field}.difficulty='percentile', or set {field}.pacing.end"
            raise DataError(Problem(f"{field}.index", metric.index, problem, remedy))
        # Rounded up, so that the last difficulty admits the hardest sample.
        largest = math.ceil(extremes[1] / pacing.multiple) * pacing.multiple
        pacing = dataclasses.replace(pacing, end=largest)
        problems = pacing_problems(
            f"{field}.pacing",
            pacing,
            num_steps=num_steps,
            longest=(f"the largest {index.metric}", largest),
        )
        if found := list(problems):
            raise ConfigError(*found)
    return Difficulty(index, make_pacing(pacing), is_percentile)
