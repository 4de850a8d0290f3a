"""Checks of curriculum learning and of dropping, and weighted draws of a curriculum."""

import math
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from zjax.errors import Problem
from zjax.schedule.lengths import shape_problems, token_problems
from zjax.schedule.pacing import Pacing, metric_field, pacing_problems
from zjax.settings import axes, mixture, schema
from zjax.settings.layers import cannot_unroll

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


_TOKENS, _LAYERS, _ALL_LAYERS = "random_ltd", "layer_drop.theta", "layer_drop=None"


def num_middle_layers(config: schema.Config, num_devices: int) -> int:
    """Number of layers that may run on a subset of the tokens.

    Middle layers are the layers of all blocks but the first and the last. All chunks of
    a pipeline are one program, and run the slots of these two blocks whole in every
    chunk.
    """
    shapes = mixture.segment_shapes(config.model)
    blocks = [len(x.layers) for x in shapes for _ in range(x.num_blocks)]
    # Chunks have equal numbers of slots: the last chunk may have empty slots.
    num_slots = -(-len(blocks) // _num_chunks(config, num_devices))
    whole = {0, (len(blocks) - 1) % num_slots}
    return sum(size for i, size in enumerate(blocks) if i % num_slots not in whole)


def _num_chunks(config: schema.Config, num_devices: int) -> int:
    """Number of chunks over all pipeline stages; 1 without a pipeline."""
    stages = max(1, axes.axis_sizes(config, num_devices)["pipeline"])
    return stages * config.pipeline.chunks_per_stage


def dropping_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields problems of `random_ltd` and `layer_drop` in a run of any model."""
    if config.random_ltd:
        yield from _pacing_problems(config.random_ltd, config)
    if not config.layer_drop:
        return
    theta = config.layer_drop.theta
    if axes.mesh_fills(config, num_devices):
        yield from _skipped_stages(theta, config, num_devices)
    activations, memory = config.model.activation_memory, config.zero.optimizer_memory
    if activations != "device" and memory == "device":
        problem = f"is not built for model.activation_memory={activations!r}"
        remedy = f"use 'device', or {_ALL_LAYERS}"
        yield Problem(_LAYERS, theta, problem, remedy)


def model_dropping_problems(
    config: schema.Config, num_devices: int
) -> Iterator[Problem]:
    """Yields problems of `random_ltd` and `layer_drop` with a built-in model."""
    if dropping := config.random_ltd:
        yield from _token_problems(dropping, config, num_devices)
        yield from _tile_problems(config, _TOKENS, dropping.kind, "None")
    if drop := config.layer_drop:
        yield from _tile_problems(config, _LAYERS, drop.theta, _ALL_LAYERS)
    if drop and config.model.kind == "encoder":
        problem = (
            "scales what a layer adds, and model.kind='encoder' normalises the sum"
        )
        remedy = f"use {_ALL_LAYERS}, or a decoder"
        yield Problem(_LAYERS, drop.theta, problem, remedy)


def _pacing_problems(
    dropping: schema.RandomLTD, config: schema.Config
) -> Iterator[Problem]:
    return token_problems("random_ltd.pacing", dropping.pacing, config)


def _tile_problems(
    config: schema.Config, field: str, value: str | float, off: str
) -> Iterator[Problem]:
    """Yields a problem for a setting that offloaded MLP tiles do not support.

    `off` is the value that leaves the feature out.
    """
    tiles, memory = config.model.mlp_tiles, config.zero.optimizer_memory
    if tiles > 1 and memory != "device":
        problem = f"is not built for tiles of model.mlp_tiles={tiles} "
        problem += f"with zero.offload={memory!r}"
        yield Problem(field, value, problem, f"use {off}, or mlp_tiles=1")


def _skipped_stages(
    theta: float, config: schema.Config, num_devices: int
) -> Iterator[Problem]:
    """Yields reasons why pipeline stages cannot skip different layers."""
    sizes = axes.axis_sizes(config, num_devices)
    if sizes["pipeline"] == 1:
        return
    found = [
        f"mesh.{axis}={sizes[axis]}"
        for axis in ("expert", "sequence", "tensor")
        if sizes[axis] > 1
    ]
    if config.zero.stage == 3 and math.prod(sizes[x] for x in axes.BATCH_AXES) > 1:
        found.append("zero.stage=3")
    for setting in found:
        problem = f"has stages of mesh.pipeline={sizes['pipeline']} skip different "
        problem += f"layers, and layers of {setting} communicate in all stages at once"
        remedy = f"leave {setting.split('=')[0]} out, or use mesh.pipeline=1 or "
        remedy += _ALL_LAYERS
        yield Problem(_LAYERS, theta, problem, remedy)
    if isinstance(config.pipeline, schema.ZbH1):
        problem = "skips a layer as a whole, and pipeline='zb_h1' takes its "
        problem += "backward pass apart"
        yield Problem(_LAYERS, theta, problem, f"use '1f1b' there, or {_ALL_LAYERS}")


def _middle_problems(
    kind: str, config: schema.Config, num_devices: int
) -> Iterator[Problem]:
    """Yields problems of the layers that `random_ltd` of a kind drops tokens of."""
    model = config.model
    num_stages = axes.axis_sizes(config, num_devices)["pipeline"]
    middle, stride = num_middle_layers(config, num_devices), model.layers_per_scan
    shapes = mixture.segment_shapes(model)
    if num_stages > 1 and len(shapes) > 1:
        problem = f"does not count the tokens of {len(shapes)} kinds of blocks on the "
        problem += f"stages of mesh.pipeline={num_stages}"
        yield Problem(_TOKENS, kind, problem, "use None, or mesh.pipeline=1")
    elif num_stages > 1 and not middle:
        problem = "has no layer to drop tokens of: as the stages of "
        problem += f"mesh.pipeline={num_stages} run one program, all layers run whole "
        problem += "beside the first or the last one"
        yield Problem(_TOKENS, kind, problem, "use None, or fewer stages or chunks")
    elif not middle:
        problem = f"has no layer between the first and the last of {model.num_layers}"
        yield Problem(_TOKENS, kind, problem, "use None, or more layers")
    elif num_stages == 1 and stride and middle % stride:
        problem = f"does not divide the {middle} layers that random_ltd={kind!r} "
        problem += "drops tokens of"
        remedy = axes.suggest_divisors(math.gcd(middle, model.num_layers))
        yield Problem("model.layers_per_scan", stride, problem, remedy)


def _token_problems(
    dropping: schema.RandomLTD, config: schema.Config, num_devices: int
) -> Iterator[Problem]:
    """Yields problems of random token dropping with a built-in model."""
    kind, pacing = dropping.kind, dropping.pacing
    if not list(_pacing_problems(dropping, config)):
        yield from shape_problems("random_ltd.pacing", pacing, config, num_devices)
    if axes.mesh_fills(config, num_devices):
        yield from _middle_problems(kind, config, num_devices)
    if cannot_unroll(config) and config.zero.optimizer_memory == "device":
        problem = (
            "repeats a cuDNN kernel for other numbers of tokens, which cannot run "
        )
        problem += "with deterministic=True"
        remedy = "use None, or model.attention='xla'"
        yield Problem(_TOKENS, kind, problem, remedy)
