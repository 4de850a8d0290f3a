"""Checks the settings of low-rank adapters."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from zjax.config import axes, schema
from zjax.config.groups import frozen_as_masters
from zjax.errors import Problem


def adapter_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Refuses settings of `lora` that have no effect, and runs that have no adapters.

    Args:
        config: Settings of the run.
        num_devices: Devices of the run.

    Yields:
        A problem for each setting.
    """
    lora = config.lora
    if not lora.rank:
        yield from _without_effect(lora)
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
    remedy = "leave one of them out"
    if setting := frozen_as_masters(config):
        problem = f"does not combine with {setting}, which has no frozen parameters"
        yield Problem("lora.rank", lora.rank, problem, remedy)
    if lora.quantize:
        yield from _quantize_problems(config, num_devices)


def _quantize_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """What does not work with frozen matrices of codes."""
    value, found = config.lora.quantize, [*_unquantized(config)]
    if axes.mesh_fills(config, num_devices):
        size = axes.axis_sizes(config, num_devices)["tensor"]
        found += [("mesh.tensor", size)] if size > 1 else []
    for field, other in found:
        problem = f"does not combine with {field}={other!r}"
        yield Problem("lora.quantize", value, problem, "leave one of them out")


def _unquantized(config: schema.Config) -> Iterator[tuple[str, Any]]:
    settings = {
        "lora.form": (config.lora.form, ("lora",)),
        "precision.matmul_dtype": (config.precision.matmul_dtype, ("compute",)),
        "model.moe.num_experts": (config.model.moe.num_experts, (0,)),
        "mesh.pipeline": (config.mesh.pipeline, (1,)),
        "zero.optimizer_memory": (config.zero.optimizer_memory, ("device",)),
        "zero.shard_over_replica": (config.zero.shard_over_replica, (False,)),
        "communication.num_local_steps": (config.communication.num_local_steps, (0,)),
    }
    for field, (value, allowed) in settings.items():
        if value not in allowed:
            yield field, value


def _without_effect(lora: schema.Lora) -> Iterator[Problem]:
    default = schema.Lora()
    for field in dataclasses.fields(lora):
        value = getattr(lora, field.name)
        if value != getattr(default, field.name):
            problem, remedy = "has no effect with lora.rank=0", "set lora.rank, too"
            yield Problem(f"lora.{field.name}", value, problem, remedy)
