"""Checks communication between replicas and nodes: codecs, local steps and ZeRO++."""

from collections.abc import Iterator

from zjax.errors import Problem
from zjax.settings import axes, choices, schema

_IN_FULL = ("none", "bfloat16")
"""Codecs without error feedback."""


def communication_problems(
    config: schema.Config, num_devices: int
) -> Iterator[Problem]:
    """Yields problems of `communication`, and of optimizers that compress messages."""
    rule, codec = config.optimizer.rule, config.communication.codec
    if isinstance(rule, schema.Compressed):
        field, value, other = "optimizer.rule", rule.kind, "another rule"
        yield from _optimizer_problems(rule, config)
    elif codec != "none":
        field, value, other = "communication.codec", codec, "'none'"
    else:
        return
    if axes.axis_sizes(config, num_devices)["replica"] == 1:
        problem = "has no effect with mesh.replica=1"
        yield Problem(field, value, problem, f"use mesh.replica=2 or more, or {other}")
    if (memory := config.zero.optimizer_memory) != "device":
        problem = f"is not built for zero.offload={memory!r}"
        remedy = f"keep the state on the devices, or use {other}"
        yield Problem(field, value, problem, remedy)


def _optimizer_problems(
    rule: schema.Compressed, config: schema.Config
) -> Iterator[Problem]:
    """Yields settings that contradict an optimizer that compresses messages."""
    name = f"with optimizer.rule={rule.kind!r}"
    if config.num_steps == 1:
        problem = f"leaves no step to send less {name}"
        yield Problem("num_steps", 1, problem, "use 2 or more")
    elif rule.freeze_step >= config.num_steps:
        problem = f"leaves none of num_steps={config.num_steps} to send less"
        remedy = f"use at most {config.num_steps - 1}"
        field = "optimizer.rule.freeze_step"
        yield Problem(field, rule.freeze_step, problem, remedy)
    if (codec := config.communication.codec) not in _IN_FULL:
        # Error feedback of gradients would be added to steps, which have other units.
        problem = f"does not send the warm-up in full {name}"
        yield Problem("communication.codec", codec, problem, "use 'bfloat16' or 'none'")
    if config.precision.master_dtype != "float32":
        problem, field = f"is not built {name}", "precision.master_dtype"
        yield Problem(field, config.precision.master_dtype, problem, "use 'float32'")
    for field, value in (
        ("optimizer.ema_decay", config.optimizer.ema_decay),
        # Biases have no gradients: an exchange would undo the changes of local steps.
        ("model.moe.bias_rate", config.model.bias_rate),
        ("model.moe.choice_bias", choices.value_at(config, "model.moe.choice_bias")),
    ):
        if isinstance(rule, schema.ZeroOneAdam) and value:
            remedy = f"leave it at {type(value)()}"
            yield Problem(field, value, f"is not built {name}", remedy)
    if groups := config.optimizer.groups:
        problem, remedy = f"is not built {name}", "leave it at ()"
        yield Problem("optimizer.groups", groups, problem, remedy)


def local_steps_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields problems of rounds of local steps."""
    if (settings := config.communication.local_steps) is None:
        return
    yield from _round_problems(settings, config.num_steps)
    field, length = "communication.local_steps.num_steps", settings.num_steps
    off = "communication.local_steps=None"
    if axes.axis_sizes(config, num_devices)["replica"] == 1:
        problem = "has no effect with mesh.replica=1"
        yield Problem(field, length, problem, f"use mesh.replica=2 or more, or {off}")
    for other, value, needed in (
        ("zero.offload", choices.value_at(config, "zero.offload"), None),
        ("zero.replicas", choices.value_at(config, "zero.replicas"), None),
        ("precision.master_dtype", config.precision.master_dtype, "float32"),
        ("optimizer.ema_decay", config.optimizer.ema_decay, 0.0),
    ):
        if value != needed:
            remedy = f"use {other}={needed}, or {off}"
            yield Problem(field, length, f"is not built for {other}={value!r}", remedy)
    if isinstance(rule := config.optimizer.rule, schema.Compressed):
        problem = f"leaves optimizer.rule={rule.kind!r} nothing to send"
        yield Problem(field, length, problem, f"use another rule, or {off}")


def _round_problems(settings: schema.LocalSteps, total: int) -> Iterator[Problem]:
    """Yields lengths of rounds, fragments and delays that do not fit the run."""
    section = "communication.local_steps"
    field, length = f"{section}.num_steps", settings.num_steps
    number, delay = settings.num_fragments, settings.delay
    together, first = settings.num_synchronous_steps, "num_synchronous_steps"
    apart, run = total - together, f"num_steps={total}"
    span = f"{run} after {first}={together}" if together else run
    if length > total:
        problem = f"is more than {run}: nothing is exchanged"
        yield Problem(field, length, problem, f"use at most {total}")
    elif apart < 1:
        problem = f"leaves no local step in {run}"
        remedy = f"use at most {total - length}, or {section}=None"
        yield Problem(f"{section}.{first}", together, problem, remedy)
    elif length > apart:
        problem = f"is more than {span}: nothing is exchanged"
        yield Problem(field, length, problem, f"use at most {apart}")
    elif rest := apart % length:
        problem = f"leaves the last {rest} of {span} unmerged"
        divided = f"num_steps - {first}" if together else "num_steps"
        yield Problem(field, length, problem, f"use a divisor of {divided}")
    if number <= length and delay >= length // number:
        problem = f"is not less than the {length // number} steps between two merges"
        remedy = f"use at most {length // number - 1}"
        yield Problem(f"{section}.delay", delay, problem, remedy)


def node_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields problems of `zero.replicas` and of ZeRO++ settings.

    Example:
        >>> zero = schema.Zero(stage=3, replicas=schema.Sharded())
        >>> print(*node_problems(schema.Config(zero=zero), 8))
        zero.replicas='sharded' has no effect with mesh.replica=1; leave it out, or \
set mesh.replica to the number of nodes
    """
    zero = config.zero
    if not zero.replicas:
        return
    field, sizes = "zero.replicas", axes.axis_sizes(config, num_devices)
    if sizes["replica"] == 1:
        problem = "has no effect with mesh.replica=1"
        remedy = "leave it out, or set mesh.replica to the number of nodes"
        yield Problem(field, "sharded", problem, remedy)
    for axis in ("pipeline", "expert", "sequence", "tensor"):
        if sizes[axis] > 1:
            problem = f"is not built for mesh.{axis}={sizes[axis]}"
            yield Problem(field, "sharded", problem, f"use None, or mesh.{axis}=1")
    if zero.offloads_state:
        problem = f"is not built for zero.offload={zero.optimizer_memory!r}"
        yield Problem(field, "sharded", problem, "use None, or zero.offload=None")
    yield from _messages(config)
    if zero.messages.secondary_partition and sizes["data"] == 1:
        problem = "stores all parameters on each device of mesh.data=1"
        remedy = "use False, or more devices per node"
        yield Problem("zero.replicas.secondary_partition", True, problem, remedy)


def _messages(config: schema.Config) -> Iterator[Problem]:
    """Yields codecs between copies of the model, if all nodes share one copy."""
    codec, rule = config.communication.codec, config.optimizer.rule
    problem = "needs copies of the model, and zero.replicas='sharded' keeps one"
    if codec != "none":
        remedy = "use 'none', or zero.replicas=None"
        yield Problem("communication.codec", codec, problem, remedy)
    if isinstance(rule, schema.Compressed):
        remedy = "use another rule, or zero.replicas=None"
        yield Problem("optimizer.rule", rule.kind, problem, remedy)
