"""Finds settings that were changed but that this run does not read."""

import dataclasses
import functools
import operator
from collections.abc import Iterator
from typing import Any

from zjax.errors import Problem
from zjax.schedule import lengths
from zjax.settings import choices, derived, describe, rl, schema

# Settings that apply to a user's optimizer, too.
_BESIDE_USER_OPTIMIZER = ("optimizer.clip_norm", "optimizer.ema_decay")


def effect_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields a problem for each changed setting that nothing reads."""
    for setting, other, values in describe.NEEDS:
        if (given := choices.value_at(config, other)) in values:
            continue
        found = _value_and_default(config, setting)
        for field, value, default in _changed(*found, setting):
            # Values that the user did not write need not have an effect.
            if derived.is_derived(value) or derived.is_offered(value):
                continue
            problem = f"has no effect with {other}={given!r}"
            one_of = " or ".join(map(repr, values))
            leave = "leave it out" if default is None else f"leave it at {default!r}"
            remedy = f"{leave}, or set {other} to {one_of}"
            yield Problem(field, choices.value_at(config, field), problem, remedy)
    yield from lengths.beside_problems(config)
    yield from _moments(config)
    yield from _vectors(config)
    yield from _reduction(config)
    yield from _early_stopping(config.evaluation)
    yield from _project(config)
    yield from _processes(config)


def user_optimizer_problems(config: schema.Config) -> Iterator[Problem]:
    """Yields changed optimizer settings, for runs whose caller brings an optimizer."""
    given, default = config.optimizer, schema.Optimizer()
    for field, value, unset in _changed(given, default, "optimizer"):
        is_unread = field not in _BESIDE_USER_OPTIMIZER
        if is_unread and not derived.is_recipe(value):
            problem = "has no effect on the optimizer that was given"
            remedy = f"leave it at {unset!r}, or give no optimizer"
            yield Problem(field, value, problem, remedy)
    critic = config.rl and config.rl.critic
    if isinstance(critic, rl.Own) and (rate := critic.peak_learning_rate):
        problem = "has no effect on the optimizer that was given"
        remedy = "leave it at 0.0, or give no optimizer"
        yield Problem("rl.critic.peak_learning_rate", rate, problem, remedy)
    if config.buckets and config.buckets.learning_rate != "constant":
        problem = "has no effect on the optimizer that was given"
        remedy = "leave it at 'constant', or give no optimizer"
        rate = config.buckets.learning_rate
        yield Problem("buckets.learning_rate", rate, problem, remedy)


def _changed(value: Any, default: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yields path, value and default of each setting that is not at the default."""
    are_sections = all(map(dataclasses.is_dataclass, (value, default)))
    if not are_sections:
        if value != default:
            yield path, value, default
        return
    if isinstance(value, choices.Choice) and value.kind != default.kind:
        yield path, value.kind, default.kind
        default = type(value)()
    for name in choices.names(type(value)):
        yield from _changed(
            getattr(value, name), getattr(default, name), f"{path}.{name}"
        )


def user_model_problems(config: schema.Config) -> Iterator[Problem]:
    """Yields settings outside `model` and `data` that only built-in models read."""
    for setting in (
        "num_tokens",
        "precision.matmul_dtype",
        "precision.batch_invariant",
        "lora.dropout",
        "sequence_warmup",
        "curriculum.metrics",
        "buckets",
        "random_ltd.pacing.num_tokens",
    ):
        value = choices.value_at(config, setting)
        # None is a setting of a section that is off.
        if value and value != choices.value_at(schema.Config(), setting):
            problem = "has no effect on the model that was given"
            remedy = "leave it out, or give no model"
            yield Problem(setting, value, problem, remedy)


def _moments(config: schema.Config) -> Iterator[Problem]:
    """Yields a moment dtype of an SGD without momentum."""
    rule = config.optimizer.rule
    if not isinstance(rule, schema.Sgd | schema.SgdL2):
        return
    if rule.b1 == 0 and rule.moment_dtype != "float32":
        problem = "has no effect with optimizer.rule.b1=0.0"
        remedy = "leave it at 'float32', or set optimizer.rule.b1 above 0"
        field = "optimizer.rule.moment_dtype"
        yield Problem(field, rule.moment_dtype, problem, remedy)


def _vectors(config: schema.Config) -> Iterator[Problem]:
    """Yields `decay_vectors` if no weight decay is set."""
    given = config.optimizer
    decays = given.weight_decay, *(group.weight_decay for group in given.groups)
    if given.decay_vectors and max(decays) <= 0:
        problem = "has no effect with optimizer.weight_decay=0.0"
        remedy = "leave it at False, or set optimizer.weight_decay above 0"
        yield Problem("optimizer.decay_vectors", True, problem, remedy)


def _reduction(config: schema.Config) -> Iterator[Problem]:
    """Yields a float32 reduction that ZeRO-3 or the dtype of sums rules out."""
    precision = config.precision
    if precision.reduce_dtype == "compute":
        return
    if config.zero.stage == 3:
        problem = "cannot reduce gradients of split parameters (zero.stage=3)"
        remedy = "use 'compute', or zero.stage=2"
        yield Problem("precision.reduce_dtype", "float32", problem, remedy)
    if precision.grad_sum_dtype != "float32":
        problem = f"is wider than precision.grad_sum_dtype={precision.grad_sum_dtype!r}"
        remedy = "make both 'float32'"
        yield Problem("precision.reduce_dtype", "float32", problem, remedy)


def _early_stopping(given: schema.Evaluation) -> Iterator[Problem]:
    """Yields early stopping without evaluation."""
    for name in ("every_steps", "num_batches"):
        if given.early_stopping and not getattr(given, name):
            patience = given.early_stopping.patience
            problem = f"has no effect with evaluation.{name}=0"
            remedy = f"leave it out, or set evaluation.{name}"
            field = "evaluation.early_stopping.patience"
            yield Problem(field, patience, problem, remedy)


def _project(config: schema.Config) -> Iterator[Problem]:
    """Yields a project name without a sink that has projects."""
    value, default = _value_and_default(config, "observe.project")
    if not {"wandb", "mlflow"} & set(config.observe.sinks) and value != default:
        problem = "has no effect without a sink that has projects"
        remedy = f"leave it at {default!r}, or add 'wandb' or 'mlflow' to observe.sinks"
        yield Problem("observe.project", value, problem, remedy)


def _processes(config: schema.Config) -> Iterator[Problem]:
    """Yields process settings that the coordinator does not read."""
    coordinator = config.processes.coordinator
    names = ["num_processes", "process_id"]
    if coordinator not in ("auto", "none"):
        return
    if coordinator == "none":
        names.append("heartbeat_seconds")
    for name in names:
        value, default = _value_and_default(config, f"processes.{name}")
        if value != default:
            problem = f"has no effect with processes.coordinator={coordinator!r}"
            remedy = f"leave it at {default}, or set processes.coordinator"
            yield Problem(f"processes.{name}", value, problem, remedy)


def _value_and_default(config: schema.Config, path: str) -> tuple[Any, Any]:
    """Value of a setting, and the value if nobody sets it in this config."""
    value = operator.attrgetter(path)
    default = value(_with_default(config, path.partition(".")[0]))
    if derived.is_derived(default):  # perhaps from a setting of the same section
        default = value(_replaced(config, path, derived.reset(default)))
    return value(config), default


def _replaced(section: Any, path: str, value: Any) -> Any:
    """Copies a section with one setting replaced; dependent settings are derived."""
    name, _, rest = path.partition(".")
    inner = _replaced(getattr(section, name), rest, value) if rest else value
    return dataclasses.replace(section, **{name: inner})


# The rules of NEEDS ask for defaults of few sections, many times.
@functools.lru_cache(maxsize=64)
def _with_default(config: schema.Config, name: str) -> schema.Config:
    """Copies a config with one section at defaults."""
    section = getattr(schema.Config(), name)
    return dataclasses.replace(config, **{name: section})
