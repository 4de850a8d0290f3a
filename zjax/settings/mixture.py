"""Places experts in layers, segments layers into blocks, and checks MoE settings."""

import contextlib
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from zjax.errors import Problem
from zjax.settings import axes, choices, schema
from zjax.settings.attention import (
    period_of_layers,
    periods_of_layers,
    rotated_layers,
    sliding_layers,
)
from zjax.settings.parameters import FROZEN, label_of

MAX_EXPERTS = 2**16


class Layer(NamedTuple):
    """Kind of a layer."""

    num_experts: int = 0
    """Number of experts in place of the feed-forward; 0 for a dense layer."""
    slides: bool = False
    """Whether a token sees only the keys of the sliding window."""
    rotates: bool = True
    """Whether queries and keys rotate, with rotary positions."""


class SegmentShape(NamedTuple):
    """Shape of a segment: equal blocks of layers that follow one another."""

    layers: tuple[Layer, ...]
    num_blocks: int


def experts_by_layer(model: schema.Model) -> tuple[int, ...]:
    """Number of experts of each layer; 0 for a dense layer.

    Example:
        >>> moe = schema.TokenChoice(num_experts=(8, 16), every=2)
        >>> experts_by_layer(schema.Model(num_layers=5, moe=moe))
        (0, 8, 0, 16, 0)
    """
    experts = [0] * model.num_layers
    if not model.moe:
        return tuple(experts)
    places, given = _places(model.moe, model.num_layers), model.moe.num_experts
    numbers = given if isinstance(given, tuple) else [given] * len(places)
    for place, number in zip(places, numbers, strict=False):
        experts[place] = number
    return tuple(experts)


def _places(moe: schema.MoE, num_layers: int) -> range:
    """Indices of the layers that have experts."""
    return range(moe.first_dense, num_layers)[moe.every - 1 :: moe.every]


def segment_shapes(model: schema.Model) -> tuple[SegmentShape, ...]:
    """Shapes of a model's segments: runs of equal blocks.

    A block has `moe.every` layers, the last with experts, `full_attention_every`
    layers, the last with full attention, or `unrotated_every` layers, the last without
    rotation. Layers before the first and after the last such block are blocks of one
    layer.
    """
    slides, rotates = sliding_layers(model), rotated_layers(model)
    kinds = zip(experts_by_layer(model), slides, rotates, strict=True)
    layers = [Layer(*kind) for kind in kinds]
    size, first = period_of_layers(model), model.moe.first_dense if model.moe else 0
    end = first + (model.num_layers - first) // size * size
    blocks = [layers[i : i + size] for i in range(first, end, size)]
    before, behind = [[x] for x in layers[:first]], [[x] for x in layers[end:]]
    runs = itertools.groupby([*before, *blocks, *behind])
    return tuple(SegmentShape(tuple(block), len([*run])) for block, run in runs)


def num_blocks(model: schema.Model) -> int:
    """Number of blocks of all segments."""
    return sum(shape.num_blocks for shape in segment_shapes(model))


def layers_per_block(model: schema.Model) -> int:
    """Layers of the largest block."""
    return max(len(shape.layers) for shape in segment_shapes(model))


def mixture_places(model: schema.Model) -> list[tuple[int, int]]:
    """Block, and layer of the block, of each layer with experts.

    Example:
        >>> moe = schema.TokenChoice(num_experts=8, every=2, first_dense=1)
        >>> mixture_places(schema.Model(num_layers=5, moe=moe))
        [(1, 1), (2, 1)]
    """
    shapes = segment_shapes(model)
    blocks = [shape.layers for shape in shapes for _ in range(shape.num_blocks)]
    return [
        (block, place)
        for block, layers in enumerate(blocks)
        for place, layer in enumerate(layers)
        if layer.num_experts
    ]


def experts_per_token(moe: schema.MoE) -> float:
    """Mean number of experts per token in training."""
    is_of_tokens = isinstance(moe, schema.TokenChoice)
    return float(moe.top_k) if is_of_tokens else moe.capacity_factor


def sees_future(model: schema.Model) -> bool:
    """Whether later tokens of a causal model change the outputs of earlier tokens."""
    return model.kind == "decoder" and isinstance(model.moe, schema.ExpertChoice)


def noise_of_routing(model: schema.Model) -> dict[str, Any]:
    """Settings by which training mixes experts otherwise than generation, by path."""
    if not isinstance(moe := model.moe, schema.TokenChoice):
        return {}
    names, usual = ("jitter", "sampling", "drop"), schema.TokenChoice()
    values = {name: getattr(moe, name) for name in names}
    return {
        f"model.moe.{name}": value
        for name, value in values.items()
        if value != getattr(usual, name)
    }


def describe_future(model: schema.Model) -> str:
    """Warning for a decoder whose experts choose tokens; empty for other models."""
    if not sees_future(model):
        return ""
    return (
        "model.moe='expert_choice': tokens compete with later ones of their "
        "sequence.\nLosses of training and evaluation see the future, and no text is "
        "generated."
    )


def describe_blocks(model: schema.Model) -> str:
    """Number of blocks, named by the setting that defines it."""
    every = period_of_layers(model)
    if every == 1:
        return f"model.num_layers={model.num_layers}"
    periods = periods_of_layers(model)
    name = max(periods, key=periods.__getitem__)
    return f"the {num_blocks(model)} blocks of model.{name}={every}"


def mixture_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields settings of `model.moe` that contradict each other or the run."""
    if (moe := config.model.moe) is None:
        if axes.axis_sizes(config, num_devices)["expert"] > 1:
            problem = "splits experts, and model.moe=None has none"
            remedy = "use 1, or set model.moe.num_experts"
            yield Problem("mesh.expert", config.mesh.expert, problem, remedy)
        return
    wrong = list(_numbers(moe, config.model.num_layers))
    yield from wrong
    if not wrong:
        yield from routing_problems(moe)
        yield from _run(config, moe, num_devices)


def _given_numbers(moe: schema.MoE) -> tuple[int, ...]:
    """Numbers of experts as a tuple."""
    given = moe.num_experts
    return given if isinstance(given, tuple) else (given,)


def _numbers(moe: schema.MoE, num_layers: int) -> Iterator[Problem]:
    """Yields numbers of experts that are out of range or do not match the layers."""
    given, field = moe.num_experts, "model.moe.num_experts"
    if any(not 1 <= number <= MAX_EXPERTS for number in _given_numbers(moe)):
        yield Problem(field, given, "is out of range", f"use 1 to {MAX_EXPERTS}")
        return
    layers = len(_places(moe, num_layers))
    if not layers:
        name = "first_dense" if moe.first_dense >= num_layers else "every"
        problem = f"leaves none of model.num_layers={num_layers} to experts"
        rest = 1 if name == "first_dense" else moe.first_dense
        value, most = getattr(moe, name), num_layers - rest
        yield Problem(f"model.moe.{name}", value, problem, f"use at most {most}")
    elif isinstance(given, tuple) and len(given) != layers:
        problem = f"has {len(given)} numbers for {layers} MoE layers"
        yield Problem(field, given, problem, f"give {layers}, or one int for all")


def routing_problems(moe: schema.MoE) -> Iterator[Problem]:
    """Yields router settings that contradict each other, or have no effect."""
    if isinstance(moe, schema.TokenChoice):
        yield from _token_choice(moe)
    else:
        yield from _expert_choice(moe)
    yield from _without_effect(moe)


def _expert_choice(moe: schema.MoE) -> Iterator[Problem]:
    """Yields capacity factors above the number of experts."""
    fewest = min(_given_numbers(moe))
    for name in ("capacity_factor", "eval_capacity_factor"):
        value = getattr(moe, name)
        if value > fewest:
            problem = f"gives a token more than all {fewest} experts"
            yield Problem(f"model.moe.{name}", value, problem, f"use at most {fewest}")


def _token_choice(moe: schema.TokenChoice) -> Iterator[Problem]:
    """Yields settings that contradict top-k routing by tokens."""
    yield from _groups(moe)
    most = max(_given_numbers(moe))
    if moe.sampling == "second" and moe.top_k == 1:
        problem = "samples a second expert, and model.moe.top_k=1"
        yield Problem(
            "model.moe.sampling", "second", problem, "use 'first', or top_k=2"
        )
    if moe.bias_rate and moe.sampling != "none":
        problem = f"is not added to the choice of model.moe.sampling={moe.sampling!r}"
        remedy = "use 0, or sampling='none'"
        yield Problem("model.moe.bias_rate", moe.bias_rate, problem, remedy)
    if moe.bias_rate and moe.top_k == most:
        problem = f"has no effect, as each token chooses all {most} experts"
        remedy = "use 0, or more experts"
        yield Problem("model.moe.bias_rate", moe.bias_rate, problem, remedy)
    if moe.drop == "first_choices" and moe.top_k == 1:
        problem = "has no second choices to drop first with model.moe.top_k=1"
        remedy = "use 'position', or top_k=2"
        yield Problem("model.moe.drop", moe.drop, problem, remedy)
    factors = moe.capacity_factor, moe.eval_capacity_factor
    if moe.drop != "none" and min(factors) * moe.top_k >= most:
        problem = f"drops no token: each of {most} experts has room for all"
        below = f"capacity factors below {most / moe.top_k:g}"
        yield Problem("model.moe.drop", moe.drop, problem, f"use 'none', or {below}")


def _groups(moe: schema.TokenChoice) -> Iterator[Problem]:
    """Yields expert groups that do not divide the experts, or leave too few."""
    for number in sorted({*_given_numbers(moe)}):
        group, rest = divmod(number, moe.num_groups)
        if rest:
            problem = f"does not divide {number} experts"
            remedy = axes.suggest_divisors(number)
            yield Problem("model.moe.num_groups", moe.num_groups, problem, remedy)
        elif moe.top_k > group * min(moe.top_groups, moe.num_groups):
            choices = group * min(moe.top_groups, moe.num_groups)
            problem = f"is above the {choices} experts to choose from"
            remedy = f"use at most {choices}"
            yield Problem("model.moe.top_k", moe.top_k, problem, remedy)
    if moe.top_groups == moe.num_groups > 1:
        problem = f"leaves out none of model.moe.num_groups={moe.num_groups}"
        remedy = "use fewer, or 1 for both"
        yield Problem("model.moe.top_groups", moe.top_groups, problem, remedy)


def _without_effect(moe: schema.MoE) -> Iterator[Problem]:
    """Yields MoE settings that a second one makes meaningless."""
    needs = {"shared_gate": ("num_shared", moe.num_shared > 0)}
    if isinstance(moe, schema.TokenChoice):
        capacity = "capacity_factor", "eval_capacity_factor", "min_capacity"
        needs |= dict.fromkeys(capacity, ("drop", moe.drop != "none"))
        needs["normalise"] = ("top_k", moe.top_k > 1)
        needs["balance_scope"] = ("balance_loss", moe.balance_loss > 0)
    if max(_given_numbers(moe)) == 1 and moe.scores == "softmax":
        needs |= dict.fromkeys(("jitter", "sampling"), ("num_experts", False))
    for name in choices.names(type(moe)):
        other, is_read = needs.get(name, ("", True))
        value, default = getattr(moe, name), choices.default_of(type(moe), name)
        if not is_read and value != default:
            problem = f"has no effect with model.moe.{other}={getattr(moe, other)!r}"
            remedy = f"leave it at {default!r}, or set model.moe.{other}"
            yield Problem(f"model.moe.{name}", value, problem, remedy)


def _run(config: schema.Config, moe: schema.MoE, num_devices: int) -> Iterator[Problem]:
    """Yields MoE settings that contradict the mesh or the feed-forward."""
    model, sizes = config.model, axes.axis_sizes(config, num_devices)
    if model.mlp_tiles > 1:
        problem = "tiles a feed-forward, and model.moe replaces it"
        yield Problem("model.mlp_tiles", model.mlp_tiles, problem, "use 1")
    scope = moe.balance_scope if isinstance(moe, schema.TokenChoice) else "microbatch"
    if scope == "sequence":
        for axis in ("sequence", "tensor"):
            if sizes[axis] > 1:
                problem = f"cannot run with mesh.{axis}={sizes[axis]}, which splits"
                problem += " the tokens of a sequence"
                remedy = f"use 'microbatch', or mesh.{axis}=1"
                yield Problem("model.moe.balance_scope", "sequence", problem, remedy)
    given = sorted({*experts_by_layer(model)} - {0})
    wrong = [number for number in given if number % sizes["expert"]]
    if wrong:
        size = (
            "" if config.mesh.expert != -1 else f"comes out as {sizes['expert']} and "
        )
        problem = f"{size}does not divide {wrong[0]} experts"
        remedy = axes.suggest_divisors(math.gcd(*given))
        yield Problem("mesh.expert", config.mesh.expert, problem, remedy)


def bias_paths(model: schema.Model) -> list[str]:
    """Paths of the router biases of a built-in model."""
    shapes, paths = segment_shapes(model), list[str]()
    for number, shape in enumerate(shapes):
        segment = f"segment{number}/" if len(shapes) > 1 else ""
        for place, kind in enumerate(shape.layers):
            layer = f"layer{place}/" if len(shape.layers) > 1 else ""
            if kind.num_experts:
                paths.append(f"blocks/{segment}{layer}mlp/router/bias")
    return paths


def frozen_bias_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields a bias rate for routers whose biases LoRA or groups freeze."""
    rate, lora = config.model.bias_rate, config.lora
    if not rate:
        return
    paths = bias_paths(config.model)
    remedies = {
        "optimizer.groups": (
            lambda path: _is_in_frozen_group(path, config.optimizer),
            "leave the bias out of groups with learning_rate_scale=0.0",
        ),
    }
    if lora:
        remedies[f"lora.rank={lora.rank}"] = (
            lambda path: not _is_named(path, lora),
            "name the bias in lora.also_train",
        )
    for setting, (freezes, remedy) in remedies.items():
        if frozen := [path for path in paths if freezes(path)]:
            problem = f"moves {' and '.join(frozen)}, which {setting} freezes"
            remedy = f"set it to 0.0, or {remedy}"
            yield Problem("model.moe.bias_rate", rate, problem, remedy)


def _is_named(path: str, lora: schema.Lora) -> bool:
    """Whether `lora.also_train` names a parameter."""
    with contextlib.suppress(re.error):  # another rule reports the pattern
        return any(re.search(pattern, path) for pattern in lora.also_train)
    return True


def _is_in_frozen_group(path: str, optimizer: schema.Optimizer) -> bool:
    """Whether a group of learning rate 0 holds a parameter."""
    with contextlib.suppress(re.error):
        return label_of(path, optimizer.groups) == FROZEN
    return False
