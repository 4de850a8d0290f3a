"""Selects frozen parameters and adapters by path, and checks LoRA settings."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zjax.errors import Problem
from zjax.settings import axes, choices, schema

DEFAULT, FROZEN = "default", "frozen"
Groups = tuple[schema.ParamGroup, ...]


def label_of(path: str, groups: Groups) -> str:
    """Group of a parameter: `default`, `frozen`, or `group_i` for the i-th group.

    The first group whose pattern is found in the path wins.

    Example:
        >>> label_of("head/kernel", (schema.ParamGroup(pattern="^head"),))
        'group_0'
    """
    for index, group in enumerate(groups):
        if re.search(group.pattern, path):
            return f"group_{index}" if group.learning_rate_scale else FROZEN
    return DEFAULT


_MEMORIES = (
    "zero.offload",
    "zero.offload.parameter_memory",
    "zero.offload.gradient_memory",
)


def setting_that_trains_frozen(config: schema.Config) -> str:
    """Setting, as text, under which frozen weights stay float32 masters with gradients.

    Disks, and replicas that take local steps, treat all parameters alike. Empty if
    there is no such setting.
    """
    memories = {
        name: (x, x in ("nvme", "auto"))
        for name in _MEMORIES
        if (x := choices.value_at(config, name))
    }
    settings = memories | {
        "communication.local_steps.num_steps": (
            config.communication.rounds.num_steps,
            config.communication.local_steps is not None,
        ),
        "optimizer.rule": (
            config.optimizer.rule.kind,
            isinstance(config.optimizer.rule, schema.Compressed),
        ),
    }
    return next(
        (f"{k}={value!r}" for k, (value, is_on) in settings.items() if is_on), ""
    )


def is_held_frozen(path: str, config: schema.Config) -> bool:
    """Whether a parameter is stored in the compute dtype, without a gradient.

    With adapters that holds for all parameters except adapters and `lora.also_train`.

    Example:
        >>> group = schema.ParamGroup(pattern="^head", learning_rate_scale=0.0)
        >>> config = schema.Config(optimizer=schema.Optimizer(groups=(group,)))
        >>> is_held_frozen("head/kernel", config), is_held_frozen("norm/scale", config)
        (True, False)
    """
    if config.lora and not is_adapter(path):
        patterns = config.lora.also_train
        return not any(re.search(pattern, path) for pattern in patterns)
    groups = config.optimizer.groups
    return label_of(path, groups) == FROZEN and not setting_that_trains_frozen(config)


def is_adapter(path: str) -> bool:
    """Whether a parameter belongs to an adapter of `lora`.

    Example:
        >>> is_adapter("blocks/mlp/up/lora/a"), is_adapter("blocks/mlp/up/kernel")
        (True, False)
    """
    return re.search(r"(^|/)lora/(a|b|magnitude)$", path) is not None


HEAD_LAYER = "head/transform"
"""Path of the linear layer in the head of an encoder."""
_EITHER = "leave one of them out"
_ALLOWED_IN_QLORA = {
    "lora.form": ("lora",),
    "precision.matmul_dtype": ("compute",),
    "model.moe": (None,),
    "mesh.pipeline": (0, 1),
    "zero.offload": (None,),
    "zero.replicas": (None,),
    "communication.local_steps": (None,),
}
_ALLOWED_WITH_DROPOUT = {
    "lora.form": ("lora",),
    "model.mlp_chunk_tokens": (0,),
    "model.mlp_tiles": (1,),
}


def adapter_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields `lora` settings without effect, and runs that cannot have adapters."""
    lora = config.lora
    if not lora:
        return
    for name in ("targets", "also_train"):
        for pattern in getattr(lora, name):
            try:
                re.compile(pattern)
            except re.error as error:
                problem = f"is not a regular expression: {error}"
                remedy = "correct it, or escape characters with \\"
                yield Problem(f"lora.{name}", pattern, problem, remedy)
    if not lora.targets:
        yield Problem("lora.targets", (), "adapts no layer", "name some, or all by .*")
    if lora.init_from and not config.checkpoint.init_from:
        problem = "adapts the weights of checkpoint.init_from, which is empty"
        yield Problem("lora.init_from", lora.init_from, problem, "set that, too")
    if setting := setting_that_trains_frozen(config):
        problem = f"does not combine with {setting}, which has no frozen parameters"
        yield Problem("lora.rank", lora.rank, problem, _EITHER)
    if lora.quantize:
        kind = lora.quantize.kind
        yield from _clashes(
            "lora.quantize", kind, _ALLOWED_IN_QLORA, config, num_devices
        )
    if lora.dropout:
        rate = lora.dropout
        yield from _clashes(
            "lora.dropout", rate, _ALLOWED_WITH_DROPOUT, config, num_devices
        )
        yield from _head_problems(lora, config.model.kind)


def _clashes(
    field: str,
    value: Any,
    beside: Mapping[str, tuple[Any, ...]],
    config: schema.Config,
    num_devices: int,
) -> Iterator[Problem]:
    """Yields values of settings that `field` does not combine with, and a tensor axis.

    `beside` lists the values that do combine, by setting.
    """
    others = {name: choices.value_at(config, name) for name in beside}
    found = [(name, x) for name, x in others.items() if x not in beside[name]]
    if axes.mesh_fills(config, num_devices):
        size = axes.axis_sizes(config, num_devices)["tensor"]
        found += [("mesh.tensor", size)] if size > 1 else []
    for name, other in found:
        problem = f"does not combine with {name}={other!r}"
        yield Problem(field, value, problem, _EITHER)


def _head_problems(lora: schema.Lora, kind: str) -> Iterator[Problem]:
    """Yields dropout of an adapter in the head of an encoder, which has no dropout."""
    if kind == "encoder" and _adapts(lora.targets, HEAD_LAYER):
        problem = f"does not reach {HEAD_LAYER}, which lora.targets={lora.targets!r} "
        problem += "adapts"
        remedy = "name layers of blocks there, such as blocks/, or leave it at 0.0"
        yield Problem("lora.dropout", lora.dropout, problem, remedy)


def _adapts(patterns: Sequence[str], path: str) -> bool:
    """Whether a pattern of `lora.targets` matches a path."""
    with contextlib.suppress(re.error):  # another rule reports the pattern
        return any(re.search(pattern, path) for pattern in patterns)
    return False
