"""Layers with experts, and numbers of experts, in a Hugging Face config.json.

Qwen has experts in every n-th layer, except in listed layers.
"""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from zjax.errors import Problem
from zjax.huggingface.families import Family
from zjax.settings import schema
from zjax.settings.mixture import experts_by_layer

STEP, DENSE = "decoder_sparse_step", "mlp_only_layers"
"""Keys for the period of layers with experts, and for listed dense layers."""


def layer_settings(values: Mapping[str, Any], num_layers: int) -> dict[str, int]:
    """Settings of layers with experts, from a config.json without problems."""
    found = _find_settings(values, num_layers)
    return found or {"every": 1, "first_dense": 0}


def layer_values(model: schema.Model, moe: schema.MoE) -> dict[str, Any]:
    """Keys of a config.json for the layers with experts of a model."""
    every, first = moe.every, moe.first_dense
    # A period counts from layer 0; any other start takes a list of dense layers.
    step = 1 if first % every else every
    experts = enumerate(experts_by_layer(model))
    dense = [i for i, number in experts if not number and (i + 1) % step == 0]
    return {STEP: step, DENSE: dense}


def layer_problems(
    values: Mapping[str, Any], num_layers: Any, path: pathlib.Path
) -> Iterator[Problem]:
    """Yields wrong types, and layers with experts that zjax does not compute."""
    step, dense = values.get(STEP, 1), values.get(DENSE) or []
    if type(step) is not int or step < 1:
        problem = f"of {path} is no period of layers"
        yield Problem(STEP, step, problem, "correct it there")
    elif not isinstance(dense, list) or any(type(x) is not int for x in dense):
        problem = f"of {path} is no list of layers"
        yield Problem(DENSE, dense, problem, "correct it there")
    elif type(num_layers) is int and _find_settings(values, num_layers) is None:
        name = DENSE if dense else STEP
        problem = f"of {path} is not supported: zjax computes experts in every n-th "
        problem += "layer from one on"
        yield Problem(name, values.get(name), problem, "use a checkpoint without it")


def weight_problems(
    values: Mapping[str, Any], family: Family, path: pathlib.Path
) -> Iterator[Problem]:
    """Yields numbers and weights of experts that zjax does not compute.

    zjax weighs the only expert of a token by score, not by 1.
    """
    keys = {key.setting: (n, key.default) for n, key in family.keys.items()}
    name, default = keys["moe.num_experts"]
    number = values.get(name, default)
    if type(number) is int and number < 1:
        yield Problem(name, number, f"of {path} is not positive", "correct it there")
    name, default = keys["moe.top_k"]
    normalises, usual = keys.get("moe.normalise", ("", True))
    if values.get(name, default) == 1 and values.get(normalises, usual):
        problem = f"of {path} is not supported: zjax weighs a single expert by its "
        problem += "score, not by 1"
        yield Problem(name, 1, problem, "use a checkpoint without it")


def _find_settings(values: Mapping[str, Any], num_layers: int) -> dict[str, int] | None:
    """Settings that put experts into the layers of the keys; None if impossible."""
    step, dense = values.get(STEP, 1), {*(values.get(DENSE) or [])}
    layers = [i for i in range(step - 1, num_layers, step) if i not in dense]
    if not layers:
        return None
    after = layers[1] if layers[1:] else num_layers
    # Listed dense layers may lengthen the period.
    for every in (step, after - layers[0]):
        first = layers[0] - every + 1
        if first >= 0 and [*range(first, num_layers)[every - 1 :: every]] == layers:
            return {"every": every, "first_dense": first}
    return None
