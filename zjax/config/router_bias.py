"""Biases of routers, which `model.moe.bias_rate` moves, and what freezes them."""

import contextlib
import re
from collections.abc import Iterator

from zjax.config import schema
from zjax.config.groups import FROZEN, label_of
from zjax.config.mixture import segment_shapes
from zjax.errors import Problem


def bias_paths(model: schema.Model) -> list[str]:
    """Paths of the biases of all routers of a built-in model.

    Example:
        >>> moe = schema.MoE(num_experts=8, every=2, first_dense=1, bias_rate=0.01)
        >>> bias_paths(schema.Model(num_layers=5, moe=moe))
        ['blocks/segment1/layer1/mlp/router/bias']
    """
    shapes, paths = segment_shapes(model), list[str]()
    for number, shape in enumerate(shapes):
        segment = f"segment{number}/" if len(shapes) > 1 else ""
        for place, num_experts in enumerate(shape.num_experts):
            layer = f"layer{place}/" if len(shape.num_experts) > 1 else ""
            if num_experts:
                paths.append(f"blocks/{segment}{layer}mlp/router/bias")
    return paths


def frozen_bias_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Refuses to move biases by the load of experts that other settings freeze."""
    rate, lora = config.model.moe.bias_rate, config.lora
    if not rate:
        return
    paths = bias_paths(config.model)
    remedies = {
        f"lora.rank={lora.rank}": (
            lambda path: bool(lora.rank) and not _is_named(path, lora),
            "name the bias in lora.also_train",
        ),
        "optimizer.groups": (
            lambda path: _is_in_frozen_group(path, config.optimizer),
            "leave the bias out of groups with learning_rate_scale=0.0",
        ),
    }
    for setting, (freezes, remedy) in remedies.items():
        if frozen := [path for path in paths if freezes(path)]:
            problem = f"moves {' and '.join(frozen)}, which {setting} freezes"
            remedy = f"set it to 0.0, or {remedy}"
            yield Problem("model.moe.bias_rate", rate, problem, remedy)


def _is_named(path: str, lora: schema.Lora) -> bool:
    with contextlib.suppress(re.error):  # a problem of its own
        return any(re.search(pattern, path) for pattern in lora.also_train)
    return True


def _is_in_frozen_group(path: str, optimizer: schema.Optimizer) -> bool:
    with contextlib.suppress(re.error):
        return label_of(path, optimizer.groups) == FROZEN
    return False
