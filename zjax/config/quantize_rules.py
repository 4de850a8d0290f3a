"""Checks the rules of rounding, and settings that would undo or hide rounding."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from zjax.errors import Problem
from zjax.settings import choices, schema
from zjax.settings.quantize import Quantize, Rule

_LEAVE = "leave quantize out"
_ALLOWED: dict[str, tuple[tuple[Any, ...], str]] = {
    "precision.matmul_dtype": (("compute",), "rounds to other codes"),
    "model.kind": (("decoder",), "has no rounded matrices"),
    "model.mlp_tiles": ((1,), "gives each tile groups and scales of its own"),
    "lora.form": (("lora", None), "measures columns of matrices that are not rounded"),
    "lora.quantize": ((None,), "stores codes of matrices, which training rounds again"),
    "rl": ((None,), "has not been built for rounded matrices"),
    "preference": ((None,), "has not been built for rounded matrices"),
}
"""Values that go with rules of rounding, and why others do not, by setting."""
_ALLOWED_WITH_ACTIVATIONS: dict[str, tuple[Any, ...]] = {
    "lora": (None,),
    "model.latent": (None,),
}


def rounding_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields rules that round nothing, or to codes that do not exist."""
    if config.quantize is None:
        return
    rules = config.quantize.rules
    if all((x.weights, x.activations) == ("compute", "compute") for x in rules):
        remedy = f"give a rule with weights='int4', or {_LEAVE}"
        yield Problem("quantize.rules", [*rules], "rounds nothing", remedy)


def rule_problems(path: str, rule: Rule) -> Iterator[Problem]:
    """Yields groups and activations that do not go with the codes of a rule."""
    size, weights = rule.group_size, rule.weights
    if weights == "mxfp4" and size != Rule.MX_GROUP:
        problem = "is no group of weights='mxfp4'"
        yield Problem(f"{path}.group_size", size, problem, f"use {Rule.MX_GROUP}")
    elif size == 1:
        problem = "lets no inputs share a scale"
        remedy = "use 2 or more, or 0 for all inputs of an output"
        yield Problem(f"{path}.group_size", size, problem, remedy)
    if rule.activations != "compute" and weights in ("nf4", "mxfp4"):
        problem = f"has no products with weights={weights!r}"
        remedy = "use 'compute', or weights='int4'"
        yield Problem(f"{path}.activations", rule.activations, problem, remedy)


def unused_rule_problems(
    field: str, rules: Sequence[Rule], paths: Collection[str]
) -> Iterator[Problem]:
    """Yields rules that are the first to match for no linear layer.

    Args:
        field: Name of the rules in messages.
        rules: Rules, of which the first that matches decides.
        paths: Paths of the linear layers.
    """
    used = [Quantize(rules=tuple(rules)).rule_of(path) for path in paths]
    remedy = "give a model with linear layers"
    if paths:
        remedy = f"layers look like {', '.join([*paths][:3])}"
    for number, rule in enumerate(rules):
        name = f"{field}[{number}].pattern"
        if not any(map(rule.matches, paths)):
            yield Problem(name, rule.pattern, "matches no linear layer", remedy)
        elif rule not in used or rule in rules[:number]:
            problem = "matches no layer that an earlier rule leaves"
            order = "put it before, or leave it out"
            yield Problem(name, rule.pattern, problem, order)


def rounded_model_problems(
    config: schema.Config, num_devices: int
) -> Iterator[Problem]:
    """Yields settings of a built-in model that do not go with rounded matrices."""
    if config.quantize is None:
        return
    for name, (allowed, reason) in _ALLOWED.items():
        if (value := choices.value_at(config, name)) not in allowed:
            remedy = f"use {allowed[0]!r}, or {_LEAVE}"
            yield Problem(name, value, f"{reason}: quantize is set", remedy)
    for number, rule in enumerate(config.quantize.rules):
        if rule.activations == "compute":
            continue
        for name, allowed in _ALLOWED_WITH_ACTIVATIONS.items():
            if (value := choices.value_at(config, name)) not in allowed:
                field = f"quantize.rules[{number}].activations"
                problem = f"is not built for {name}={value!r}"
                remedy = f"use 'compute', or {allowed[0]!r} there"
                yield Problem(field, rule.activations, problem, remedy)
