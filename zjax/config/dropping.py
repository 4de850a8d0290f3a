"""What training steps leave out: tokens of middle layers, and whole layers."""

import dataclasses
import itertools
import math
from collections.abc import Iterator

from zjax.config import axes, mixture, schema
from zjax.config.layers import cannot_unroll
from zjax.config.lengths import (
    in_steps,
    make_lengths,
    make_shapes,
    shape_problems,
    token_problems,
)
from zjax.config.pacing import Pacing, hold, make_pacing
from zjax.errors import Problem

_TOKENS, _LAYERS = "random_ltd.form", "layer_drop.theta"
_ONE_ROW = hold(1)


@dataclasses.dataclass(frozen=True)
class DroppingSchedule:
    """Tokens that middle layers run on, and probabilities of layers, by step.

    Steps are 1 or more; the schedules of the papers count from 0.

    Args:
        kept: Tokens of each row by the number of steps before.
        lengths: Tokens per sequence by step.
        rows: Sequences of a batch by step.
        theta: Limit of the probability of the last layer; 1 drops none.
        gamma: Rate at which the probability falls to it.

    Example:
        >>> from zjax.config.pacing import grow
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
        """Tokens of each row that middle layers run on; at most those of the row."""
        return min(self.kept.at(step - 1), self.lengths.at(step))

    def theta_at(self, step: int) -> float:
        """Probability that the last layer runs; earlier ones run more often."""
        return self.theta + (1 - self.theta) * math.exp(-self.gamma * (step - 1))

    def firsts(self) -> list[int]:
        """First step of each pair of a length and a number of tokens, ascending."""
        kept = [1, *(first + 1 for first in self.kept.changes())]
        numbers = sorted({*kept, *self.lengths.changes()})
        pairs = [(self.num_kept(n), self.lengths.at(n)) for n in numbers]
        changes = (i == 0 or pairs[i] != pairs[i - 1] for i in range(len(pairs)))
        return [*itertools.compress(numbers, changes)]

    def sum_until(self, step: int) -> int:
        """Tokens that a middle layer runs on over the first steps.

        Example:
            >>> from zjax.config.pacing import grow
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
    """The schedule of a run.

    Example:
        >>> make_dropping(schema.Config()).num_kept(1)
        1024
    """
    given, lengths = config.random_ltd, make_lengths(config)
    kept = hold(config.data.length)
    if given.form != "none":
        kept = make_pacing(in_steps(config, given.pacing))
    gamma = config.layer_drop.gamma or 100 / config.num_steps
    firsts, shapes = zip(*make_shapes(config).items(), strict=True)
    rows = Pacing((0, *firsts[1:]), tuple(number for number, _ in shapes))
    return DroppingSchedule(kept, lengths, rows, config.layer_drop.theta, gamma)


def dropping_values(
    config: schema.Config, dropping: DroppingSchedule, step: int
) -> dict[str, float]:
    """What a step runs on, by the names of its metrics; empty if it drops nothing.

    Args:
        config: Read for `random_ltd.form` and `layer_drop.theta`.
        dropping: The schedule of `config`.
        step: Number of the step, 1 or more.

    Example:
        >>> config = schema.Config(random_ltd=schema.RandomLTD(form="span"))
        >>> dropping_values(config, make_dropping(config), 1)
        {'kept_tokens': 128.0}
    """
    drops_tokens, drops_layers = _used(config)
    values = {"kept_tokens": float(dropping.num_kept(step))} if drops_tokens else {}
    if drops_layers:
        values["layer_drop_theta"] = dropping.theta_at(step)
    return values


def num_middle_layers(model: schema.Model) -> int:
    """Layers of the blocks between the first and the last.

    Example:
        >>> num_middle_layers(schema.Model(num_layers=12))
        10
    """
    shapes = mixture.segment_shapes(model)
    blocks = [len(x.num_experts) for x in shapes for _ in range(x.num_blocks)]
    return sum(blocks[1:-1])


def dropping_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Problems of `random_ltd` and `layer_drop` in a run of any model."""
    drops_tokens, drops_layers = _used(config)
    if drops_tokens:
        yield from _pacing_problems(config)
    yield from _effects(config)
    if not axes.mesh_fills(config, num_devices):
        return
    sizes = axes.axis_sizes(config, num_devices)
    for used, field, value, name, size in (
        (drops_tokens, _TOKENS, config.random_ltd.form, "pipeline", sizes["pipeline"]),
        (drops_layers, _LAYERS, config.layer_drop.theta, "pipeline", sizes["pipeline"]),
    ):
        if used and size > 1:
            problem = f"is not built for mesh.{name}={size}"
            yield Problem(field, value, problem, f"use mesh.{name}=1, or {_off(field)}")
    activations = config.model.activation_memory
    if drops_layers and activations != "device":
        problem = f"is not built for model.activation_memory={activations!r}"
        yield Problem(_LAYERS, config.layer_drop.theta, problem, "use 'device', or 1.0")
    memory = config.zero.optimizer_memory
    if memory != "device":
        stored = (
            f"is not built for zero.optimizer_memory={memory!r}, which runs blocks "
        )
        stored += "one by one"
        if config.random_ltd.form == "span":
            yield Problem(_TOKENS, "span", stored, "use 'layerwise'")
        if drops_layers:
            yield Problem(_LAYERS, config.layer_drop.theta, stored, "use 1.0")


def model_dropping_problems(
    config: schema.Config, num_devices: int
) -> Iterator[Problem]:
    """Problems of `random_ltd` and `layer_drop` with a built-in model."""
    drops_tokens, drops_layers = _used(config)
    if drops_tokens:
        yield from _token_problems(config, num_devices)
    theta, model = config.layer_drop.theta, config.model
    if drops_layers and model.kind == "encoder":
        problem = (
            "scales what a layer adds, and model.kind='encoder' normalises the sum"
        )
        yield Problem(_LAYERS, theta, problem, "use 1.0, or a decoder")
    if drops_layers and model.moe.num_experts:
        problem = "would leave out experts of model.moe.num_experts="
        problem += f"{model.moe.num_experts}, whose load has to be even"
        yield Problem(_LAYERS, theta, problem, "use 1.0")


def _pacing_problems(config: schema.Config) -> Iterator[Problem]:
    return token_problems("random_ltd.pacing", config.random_ltd.pacing, config)


def _used(config: schema.Config) -> tuple[bool, bool]:
    return config.random_ltd.form != "none", config.layer_drop.theta < 1


def _off(field: str) -> str:
    return f"{field}='none'" if field == _TOKENS else f"{field}=1.0"


def _effects(config: schema.Config) -> Iterator[Problem]:
    gamma = config.layer_drop.gamma
    if gamma and config.layer_drop.theta == 1:
        problem, remedy = "has no effect with layer_drop.theta=1.0", "leave it at 0.0"
        yield Problem("layer_drop.gamma", gamma, problem, remedy)


def _token_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    form, model, pacing = config.random_ltd.form, config.model, config.random_ltd.pacing
    if not list(_pacing_problems(config)):
        yield from shape_problems("random_ltd.pacing", pacing, config, num_devices)
    middle, stride = num_middle_layers(model), model.layers_per_scan
    if not middle:
        problem = f"has no layer between the first and the last of {model.num_layers}"
        yield Problem(_TOKENS, form, problem, "use 'none', or more layers")
    elif stride and middle % stride:
        problem = f"does not divide the {middle} layers that random_ltd.form={form!r} "
        problem += "drops tokens of"
        remedy = axes.suggest_divisors(math.gcd(middle, model.num_layers))
        yield Problem("model.layers_per_scan", stride, problem, remedy)
    if config.buckets.form != "none":
        problem = f"is not built for buckets.form={config.buckets.form!r}, whose rows "
        problem += "have other lengths"
        yield Problem(_TOKENS, form, problem, "use one of the two")
    if model.mlp_tiles > 1 and config.zero.optimizer_memory != "device":
        problem = f"is not built for tiles of model.mlp_tiles={model.mlp_tiles} "
        problem += f"with zero.optimizer_memory={config.zero.optimizer_memory!r}"
        yield Problem(_TOKENS, form, problem, "use 'none', or mlp_tiles=1")
    if cannot_unroll(config) and config.zero.optimizer_memory == "device":
        problem = (
            "repeats a cuDNN kernel for other numbers of tokens, which cannot run "
        )
        problem += "with deterministic=True"
        remedy = "use 'none', or model.attention='xla'"
        yield Problem(_TOKENS, form, problem, remedy)
