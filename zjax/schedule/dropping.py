"""Schedules of random token dropping and of progressive layer dropping."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

from zjax.errors import Problem
from zjax.schedule.lengths import (
    in_steps,
    make_lengths,
    make_shapes,
    make_tokens,
    shape_problems,
    token_problems,
)
from zjax.schedule.pacing import Pacing, hold, make_pacing
from zjax.settings import axes, mixture, schema
from zjax.settings.layers import cannot_unroll

_TOKENS, _LAYERS = "random_ltd.form", "layer_drop.theta"
_ONE_ROW = hold(1)


@dataclasses.dataclass(frozen=True)
class DroppingSchedule:
    """Tokens that middle layers run on, and probabilities of layers, by step.

    Steps are 1 or more; the schedules of the papers count from 0.

    Args:
        kept: Tokens of each row that middle layers run on, by the number of earlier
            steps.
        lengths: Tokens per row by step.
        rows: Rows of a batch by step.
        theta: Limit of the probability of the last layer, above 0 to 1; 1 drops no
            layer.
        gamma: Rate at which the probability of the last layer falls to `theta`.

    Example:
        >>> from zjax.schedule.pacing import grow
        >>> kept = grow(128, 2048, 200_000, multiple=16)
        >>> schedule = DroppingSchedule(kept, hold(2048))
        >>> [schedule.num_kept(step + 1) for step in (0, 1_666, 1_667, 100_000)]
        [128, 128, 144, 1088]
        >>> schedule = DroppingSchedule(kept, kept, theta=0.5, gamma=0.001)
        >>> round(schedule.theta_at(1_001), 6)
        0.68394

    Reference:
        Yao et al., Random-LTD (arXiv:2211.11586), section 3.2; Zhang and He,
        Progressive Layer Dropping (arXiv:2010.13369), section 4.2.
    """

    kept: Pacing
    lengths: Pacing
    rows: Pacing = _ONE_ROW
    theta: float = 1.0
    gamma: float = 0.0

    def num_kept(self, step: int) -> int:
        """Tokens of each row that middle layers run on, at most the row's length."""
        return min(self.kept.at(step - 1), self.lengths.at(step))

    def theta_at(self, step: int) -> float:
        """Probability that the last layer runs; earlier layers run more often."""
        return self.theta + (1 - self.theta) * math.exp(-self.gamma * (step - 1))

    def firsts(self) -> list[int]:
        """First step of each pair of length and number of kept tokens, ascending."""
        # `kept` counts earlier steps, from 0.
        kept = [1, *(first + 1 for first in self.kept.changes())]
        numbers = sorted({*kept, *self.lengths.changes()})
        pairs = [(self.num_kept(n), self.lengths.at(n)) for n in numbers]
        changes = (i == 0 or pairs[i] != pairs[i - 1] for i in range(len(pairs)))
        return [*itertools.compress(numbers, changes)]

    def sum_until(self, step: int) -> int:
        """Tokens that a middle layer runs on, summed over steps 1 to `step`.

        Example:
            >>> from zjax.schedule.pacing import grow
            >>> schedule = DroppingSchedule(grow(4, 8, 2, multiple=4), hold(8))
            >>> [schedule.sum_until(step) for step in (1, 2, 3, 4)]
            [4, 8, 16, 24]
        """
        ends = itertools.pairwise([*self.firsts(), step + 1])
        return sum(
            self.rows.at(first)
            * self.num_kept(first)
            * max(0, min(after, step + 1) - first)
            for first, after in ends
        )


def make_dropping(config: schema.Config) -> DroppingSchedule:
    """Makes the dropping schedule of a run.

    Example:
        >>> make_dropping(schema.Config()).num_kept(1)
        1024
    """
    given, lengths = config.random_ltd, make_lengths(config)
    kept = hold(config.data.length)
    if given.form != "none":
        kept = make_pacing(in_steps(config, given.pacing))
    # The paper's default: the probability has settled after a few percent of the run.
    gamma = config.layer_drop.gamma or 100 / config.num_steps
    firsts, shapes = zip(*make_shapes(config).items(), strict=True)
    # A pacing begins at step 0; the first shape also holds there.
    rows = Pacing((0, *firsts[1:]), tuple(number for number, _ in shapes))
    return DroppingSchedule(kept, lengths, rows, config.layer_drop.theta, gamma)


def dropping_values(
    config: schema.Config,
    dropping: DroppingSchedule,
    step: int,
    length: int | None = None,
) -> dict[str, float]:
    """Returns the dropping metrics of a step by name; empty if the run drops nothing.

    Example:
        >>> config = schema.Config(random_ltd=schema.RandomLTD(form="span"))
        >>> dropping_values(config, make_dropping(config), 1)
        {'kept_tokens': 128.0}
    """
    drops_tokens, drops_layers = _used(config)
    num_kept = min(dropping.num_kept(step), length or config.data.length)
    values = {"kept_tokens": float(num_kept)} if drops_tokens else {}
    if drops_layers:
        values["layer_drop_theta"] = dropping.theta_at(step)
    return values


def num_middle_layers(config: schema.Config, num_devices: int) -> int:
    """Number of layers that may run on a subset of the tokens.

    Middle layers are the layers of all blocks but the first and the last. All chunks of
    a pipeline are one program, and run the slots of these two blocks whole in every
    chunk.

    Example:
        >>> config = schema.Config(mesh=schema.Mesh(pipeline=4))
        >>> num_middle_layers(schema.Config(), 1), num_middle_layers(config, 4)
        (10, 4)
    """
    shapes = mixture.segment_shapes(config.model)
    blocks = [len(x.num_experts) for x in shapes for _ in range(x.num_blocks)]
    # Chunks have equal numbers of slots: the last chunk may have empty slots.
    num_slots = -(-len(blocks) // _num_chunks(config, num_devices))
    whole = {0, (len(blocks) - 1) % num_slots}
    return sum(size for i, size in enumerate(blocks) if i % num_slots not in whole)


def make_layer_tokens(
    config: schema.Config, num_devices: int, length_at: Callable[[int], int]
) -> Callable[[int], int]:
    """Returns a function from a step to the tokens summed over layers and steps so far.

    Example:
        >>> make_layer_tokens(schema.Config(num_steps=1), 1, int)(1)  # 12 of 32 * 1,024
        393216
    """
    tokens, dropping = make_tokens(config), make_dropping(config)
    middle = num_middle_layers(config, num_devices)
    num_whole = config.model.num_layers - middle

    def kept_at(step: int) -> int:
        length = length_at(step)
        return tokens.at(step) // length * min(dropping.num_kept(step), length)

    has_buckets = config.buckets.form != "none"
    kept_until = _make_sum(kept_at) if has_buckets else dropping.sum_until
    return lambda step: tokens.sum_until(step) * num_whole + kept_until(step) * middle


def _make_sum(at: Callable[[int], int]) -> Callable[[int], int]:
    """Returns a cached prefix sum over steps, fast for steps that mostly grow."""
    step, total = 0, 0

    def until(last: int) -> int:
        nonlocal step, total
        # A caller may go back to an earlier step.
        if last < step:
            step, total = 0, 0
        total += sum(map(at, range(step + 1, last + 1)))
        step = last
        return total

    return until


def _num_chunks(config: schema.Config, num_devices: int) -> int:
    """Number of chunks over all pipeline stages; 1 without a pipeline."""
    stages = max(1, axes.axis_sizes(config, num_devices)["pipeline"])
    is_interleaved = config.pipeline.schedule == "interleaved"
    return stages * (config.pipeline.num_chunks if is_interleaved else 1)


def dropping_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields problems of `random_ltd` and `layer_drop` in a run of any model."""
    drops_tokens, drops_layers = _used(config)
    if drops_tokens:
        yield from _pacing_problems(config)
    yield from _effects(config)
    if drops_layers and axes.mesh_fills(config, num_devices):
        yield from _skipped_stages(config, num_devices)
    activations, memory = config.model.activation_memory, config.zero.optimizer_memory
    if drops_layers and activations != "device" and memory == "device":
        problem = f"is not built for model.activation_memory={activations!r}"
        yield Problem(_LAYERS, config.layer_drop.theta, problem, "use 'device', or 1.0")


def model_dropping_problems(
    config: schema.Config, num_devices: int
) -> Iterator[Problem]:
    """Yields problems of `random_ltd` and `layer_drop` with a built-in model."""
    drops_tokens, drops_layers = _used(config)
    if drops_tokens:
        yield from _token_problems(config, num_devices)
        yield from _tile_problems(config, _TOKENS, config.random_ltd.form)
    theta, model = config.layer_drop.theta, config.model
    if drops_layers:
        yield from _tile_problems(config, _LAYERS, theta)
    if drops_layers and model.kind == "encoder":
        problem = (
            "scales what a layer adds, and model.kind='encoder' normalises the sum"
        )
        yield Problem(_LAYERS, theta, problem, "use 1.0, or a decoder")


def _pacing_problems(config: schema.Config) -> Iterator[Problem]:
    return token_problems("random_ltd.pacing", config.random_ltd.pacing, config)


def _used(config: schema.Config) -> tuple[bool, bool]:
    """Whether the run drops tokens, and whether it drops layers."""
    return config.random_ltd.form != "none", config.layer_drop.theta < 1


def _effects(config: schema.Config) -> Iterator[Problem]:
    """Yields a problem for `layer_drop.gamma` without layer dropping."""
    gamma = config.layer_drop.gamma
    if gamma and config.layer_drop.theta == 1:
        problem, remedy = "has no effect with layer_drop.theta=1.0", "leave it at 0.0"
        yield Problem("layer_drop.gamma", gamma, problem, remedy)


def _tile_problems(
    config: schema.Config, field: str, value: str | float
) -> Iterator[Problem]:
    """Yields a problem for a setting that offloaded MLP tiles do not support."""
    tiles, memory = config.model.mlp_tiles, config.zero.optimizer_memory
    if tiles > 1 and memory != "device":
        problem = f"is not built for tiles of model.mlp_tiles={tiles} "
        problem += f"with zero.optimizer_memory={memory!r}"
        off = "'none'" if field == _TOKENS else "1.0"
        yield Problem(field, value, problem, f"use {off}, or mlp_tiles=1")


def _skipped_stages(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields reasons why pipeline stages cannot skip different layers."""
    theta, sizes = config.layer_drop.theta, axes.axis_sizes(config, num_devices)
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
        remedy = f"leave {setting.split('=')[0]} out, or use mesh.pipeline=1 or 1.0"
        yield Problem(_LAYERS, theta, problem, remedy)
    if config.pipeline.schedule == "zb_h1":
        problem = "skips a layer as a whole, and pipeline.schedule='zb_h1' takes its "
        problem += "backward pass apart"
        yield Problem(_LAYERS, theta, problem, "use '1f1b' there, or 1.0")


def _middle_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields problems of the layers that `random_ltd` drops tokens of."""
    form, model = config.random_ltd.form, config.model
    num_stages = axes.axis_sizes(config, num_devices)["pipeline"]
    middle, stride = num_middle_layers(config, num_devices), model.layers_per_scan
    shapes = mixture.segment_shapes(model)
    if num_stages > 1 and len(shapes) > 1:
        problem = f"does not count the tokens of {len(shapes)} kinds of blocks on the "
        problem += f"stages of mesh.pipeline={num_stages}"
        yield Problem(_TOKENS, form, problem, "use 'none', or mesh.pipeline=1")
    elif num_stages > 1 and not middle:
        problem = "has no layer to drop tokens of: as the stages of "
        problem += f"mesh.pipeline={num_stages} run one program, all layers run whole "
        problem += "beside the first or the last one"
        yield Problem(_TOKENS, form, problem, "use 'none', or fewer stages or chunks")
    elif not middle:
        problem = f"has no layer between the first and the last of {model.num_layers}"
        yield Problem(_TOKENS, form, problem, "use 'none', or more layers")
    elif num_stages == 1 and stride and middle % stride:
        problem = f"does not divide the {middle} layers that random_ltd.form={form!r} "
        problem += "drops tokens of"
        remedy = axes.suggest_divisors(math.gcd(middle, model.num_layers))
        yield Problem("model.layers_per_scan", stride, problem, remedy)


def _token_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields problems of random token dropping with a built-in model."""
    form, pacing = config.random_ltd.form, config.random_ltd.pacing
    if not list(_pacing_problems(config)):
        yield from shape_problems("random_ltd.pacing", pacing, config, num_devices)
    if axes.mesh_fills(config, num_devices):
        yield from _middle_problems(config, num_devices)
    if cannot_unroll(config) and config.zero.optimizer_memory == "device":
        problem = (
            "repeats a cuDNN kernel for other numbers of tokens, which cannot run "
        )
        problem += "with deterministic=True"
        remedy = "use 'none', or model.attention='xla'"
        yield Problem(_TOKENS, form, problem, remedy)
