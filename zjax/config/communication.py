"""Whether what replicas send each other fits the other settings."""

from collections.abc import Iterator

from zjax.config import axes, schema
from zjax.errors import Problem

COMPRESSED_OPTIMIZERS = ("onebit_adam", "onebit_lamb", "zero_one_adam")
"""Optimizers that send messages of their own."""
_IN_FULL = ("none", "bfloat16")
"""Codecs without error feedback."""


def communication_problems(
    config: schema.Config, num_devices: int
) -> Iterator[Problem]:
    """Problems of `communication`, and of optimizers that send less.

    Args:
        config: Settings in their ranges.
        num_devices: Devices of the run.
    """
    settings, codec = config.optimizer, config.communication.codec
    is_compressed = settings.name in COMPRESSED_OPTIMIZERS
    if is_compressed:
        field, value, other = "optimizer.name", settings.name, "another optimizer"
        yield from _optimizer_problems(config)
    elif codec != "none":
        field, value, other = "communication.codec", codec, "'none'"
    else:
        return
    if axes.axis_sizes(config, num_devices)["replica"] == 1:
        problem = "has no effect with mesh.replica=1"
        yield Problem(field, value, problem, f"use mesh.replica=2 or more, or {other}")
    if (memory := config.zero.optimizer_memory) != "device":
        problem = f"is not built for zero.optimizer_memory={memory!r}"
        remedy = f"keep the state on the devices, or use {other}"
        yield Problem(field, value, problem, remedy)


def _optimizer_problems(config: schema.Config) -> Iterator[Problem]:
    settings = config.optimizer
    name = f"with optimizer.name={settings.name!r}"
    if config.num_steps == 1:
        problem = f"leaves no step to send less {name}"
        yield Problem("num_steps", 1, problem, "use 2 or more")
    elif settings.freeze_step >= config.num_steps:
        problem = f"leaves none of num_steps={config.num_steps} to send less"
        remedy = f"use at most {config.num_steps - 1}"
        field = "optimizer.freeze_step"
        yield Problem(field, settings.freeze_step, problem, remedy)
    if (codec := config.communication.codec) not in _IN_FULL:
        # Errors of gradients would be added to steps, which have other units.
        problem = f"does not send the warm-up in full {name}"
        yield Problem("communication.codec", codec, problem, "use 'bfloat16' or 'none'")
    if config.precision.master_dtype != "float32":
        problem, field = f"is not built {name}", "precision.master_dtype"
        yield Problem(field, config.precision.master_dtype, problem, "use 'float32'")
    for field, value in (
        ("optimizer.ema_decay", settings.ema_decay),
        # Biases have no gradients, so exchanges would undo what local steps add.
        ("model.moe.bias_rate", config.model.moe.bias_rate),
        ("model.moe.choice_bias", config.model.moe.choice_bias),
    ):
        if settings.name == "zero_one_adam" and value:
            remedy = f"leave it at {type(value)()}"
            yield Problem(field, value, f"is not built {name}", remedy)
    if settings.groups:
        problem, remedy = f"is not built {name}", "leave it at ()"
        yield Problem("optimizer.groups", settings.groups, problem, remedy)
