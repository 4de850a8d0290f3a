"""Whether local steps of replicas fit the other settings."""

import dataclasses
from collections.abc import Iterator

from zjax.config import axes, schema
from zjax.config.communication import COMPRESSED_OPTIMIZERS
from zjax.errors import Problem

_OF_LOCAL_STEPS = (
    "num_synchronous_steps",
    "outer_learning_rate",
    "outer_momentum",
    "num_fragments",
    "delay",
    "mixing",
)


def local_steps_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Problems of `communication.num_local_steps`, and of what belongs to it.

    Args:
        config: Settings in their ranges.
        num_devices: Devices of the run.
    """
    settings = config.communication
    if not settings.num_local_steps:
        yield from _without_local_steps(settings)
        return
    yield from _rounds(config)
    length, field = settings.num_local_steps, "communication.num_local_steps"
    if axes.axis_sizes(config, num_devices)["replica"] == 1:
        problem = "has no effect with mesh.replica=1"
        yield Problem(field, length, problem, "use mesh.replica=2 or more, or 0")
    for other, value, needed in (
        ("zero.optimizer_memory", config.zero.optimizer_memory, "device"),
        ("zero.shard_over_replica", config.zero.shard_over_replica, False),
        ("precision.master_dtype", config.precision.master_dtype, "float32"),
        ("optimizer.ema_decay", config.optimizer.ema_decay, 0.0),
    ):
        if value != needed:
            remedy = f"use {other}={needed}, or 0"
            yield Problem(field, length, f"is not built for {other}={value!r}", remedy)
    if (name := config.optimizer.name) in COMPRESSED_OPTIMIZERS:
        problem = f"leaves optimizer.name={name!r} nothing to send"
        yield Problem(field, length, problem, "use another optimizer, or 0")


def _without_local_steps(settings: schema.Communication) -> Iterator[Problem]:
    defaults = {x.name: x.default for x in dataclasses.fields(schema.Communication)}
    for name in _OF_LOCAL_STEPS:
        value, default = getattr(settings, name), defaults[name]
        if value != default:
            problem = "has no effect with communication.num_local_steps=0"
            remedy = f"leave it at {default}, or set communication.num_local_steps"
            yield Problem(f"communication.{name}", value, problem, remedy)


def _rounds(config: schema.Config) -> Iterator[Problem]:
    settings, field = config.communication, "communication.num_local_steps"
    length, number, delay = (
        settings.num_local_steps,
        settings.num_fragments,
        settings.delay,
    )
    together, first = settings.num_synchronous_steps, "num_synchronous_steps"
    apart = config.num_steps - together
    run = f"num_steps={config.num_steps}"
    span = f"{run} after {first}={together}" if together else run
    if length > config.num_steps:
        problem = f"is more than {run}: nothing is exchanged"
        yield Problem(field, length, problem, f"use at most {config.num_steps}")
    elif apart < 1:
        problem = f"leaves no local step in {run}"
        remedy = f"use at most {config.num_steps - length}, or {field}=0"
        yield Problem(f"communication.{first}", together, problem, remedy)
    elif length > apart:
        problem = f"is more than {span}: nothing is exchanged"
        yield Problem(field, length, problem, f"use at most {apart}")
    elif rest := apart % length:
        problem = f"leaves the last {rest} of {span} unmerged"
        divided = f"num_steps - {first}" if together else "num_steps"
        yield Problem(field, length, problem, f"use a divisor of {divided}")
    if number > length:
        problem = f"is more than {field}={length}"
        name, remedy = "communication.num_fragments", f"use at most {length}"
        yield Problem(name, number, problem, remedy)
    elif delay >= length // number:
        problem = f"is not less than the {length // number} steps between two merges"
        remedy = f"use at most {length // number - 1}"
        yield Problem("communication.delay", delay, problem, remedy)
