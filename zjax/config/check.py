"""Checks rules between settings and devices, and reports all problems at once.

Each rule is a small function that yields problems.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

from zjax.config import (
    effect,
    model_rules,
    preference_rules,
    quantize_rules,
    rl_rules,
)
from zjax.errors import ConfigError, Problem
from zjax.schedule import dropping
from zjax.settings import (
    axes,
    batch,
    choices,
    layers,
    parameters,
    ranges,
    replicas,
    schema,
)
from zjax.settings.distill import UNCOMPARED, LayerDistance
from zjax.settings.quantize import Rule

_UNUSED_OPTIMIZER = schema.Optimizer(schedule=schema.Constant(num_warmup_steps=0))


def check_config(
    config: schema.Config,
    num_devices: int,
    *,
    user_model: bool = False,
    user_optimizer: bool = False,
    user_batches: bool = False,
) -> None:
    """Refuses settings that are out of range, contradictory or without effect.

    Args:
        config: Settings of the right types, from `load_config`.
        num_devices: Number of devices of the run, over all processes; 1 or more.
        user_model: Whether the caller brings the model and the data; then
            `config.model` and `config.data` are not checked.
        user_optimizer: Whether the caller brings the optimizer; then `config.optimizer`
            may set nothing but clipping and averaging.
        user_batches: Whether the caller brings batches; then `data.source` is not read,
            and not checked.

    Raises:
        ConfigError: All problems, in the order of the settings.

    Example:
        >>> check_config(schema.Config(mesh=schema.Mesh(tensor=3)), 4)
        Traceback (most recent call last):
        zjax.errors.ConfigError: mesh.tensor=3 does not divide 4 devices; use 1, 2 or 4
    """
    problems = list(ranges.range_problems(config))
    if user_optimizer:
        problems += effect.user_optimizer_problems(config)
        config = dataclasses.replace(config, optimizer=_UNUSED_OPTIMIZER)
    if user_model:
        problems += effect.user_model_problems(config)
    problems += _open_axes(config)
    broken = [x.field for x in problems if not isinstance(x, ranges.Above)]
    rules = _RULES + (() if user_model else model_rules.MODEL_RULES)
    rules += () if user_model or user_batches else model_rules.DATA_RULES
    for prefixes, rule in rules:
        # A rule may divide by settings, which must be in range: skip it otherwise.
        if not any(field.startswith(prefixes) for field in broken):
            problems += rule(config, num_devices)
    if problems:
        raise ConfigError(*problems)


def check_processes(config: schema.Config) -> None:
    """Refuses wrong `config.processes`, before processes meet and devices are known.

    Example:
        >>> check_processes(schema.Config(processes=schema.Processes(process_id=-2)))
        Traceback (most recent call last):
        zjax.errors.ConfigError: processes.process_id=-2 is out of range; use -1 or more
    """
    problems = list(ranges.range_problems(config.processes, "processes"))
    problems = problems or list(_processes(config, 1))
    if problems:
        raise ConfigError(*problems)


def _open_axes(config: schema.Config) -> Iterator[Problem]:
    """Yields open mesh axes, which `zjax.estimate.mesh` should have sized."""
    open_axes = [axis for axis in axes.OPEN_AXES if getattr(config.mesh, axis) == 0]
    problem = "is chosen by zjax.initialize, or by zjax.Trainer for built-in models"
    if open_axes == list(axes.OPEN_AXES):
        yield Problem("mesh", axes.AUTO, problem, "give sizes, such as mesh.data=-1")
    elif open_axes:
        yield Problem(f"mesh.{open_axes[0]}", 0, problem, "give a size")


def _mesh(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields mesh sizes that do not multiply to the number of devices."""
    given = {axis: getattr(config.mesh, axis) for axis in axes.AXES}
    remaining = [axis for axis, size in given.items() if size == -1]
    if len(remaining) > 1:
        problem = f"takes the remaining devices, as does mesh.{remaining[0]}=-1"
        yield Problem(f"mesh.{remaining[1]}", -1, problem, "keep -1 for one of them")
        return
    misfits = [axis for axis, size in given.items() if size > 0 and num_devices % size]
    for axis in misfits:
        problem = f"does not divide {num_devices} devices"
        yield Problem(
            f"mesh.{axis}", given[axis], problem, axes.suggest_divisors(num_devices)
        )
    if misfits or axes.mesh_fills(config, num_devices):
        return
    known = math.prod(size for size in given.values() if size > 0)
    axis = max(axes.AXES, key=lambda axis: given[axis] if axis not in remaining else 0)
    # On a default mesh the natural axis to change is `data`.
    axis = "data" if known == 1 else axis
    others = known // given[axis]
    problem = f"makes a mesh of size {known} for {num_devices} devices"
    fit, left = divmod(num_devices, others)
    remedy = f"use {fit} or -1" if not left else axes.suggest_divisors(num_devices)
    if remaining:
        problem = f"needs a multiple of {known} devices, and there are {num_devices}"
        remedy = axes.suggest_divisors(math.gcd(num_devices, fit))
    yield Problem(f"mesh.{axis}", given[axis], problem, remedy)


def _batch(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields contradictory batch sizes, and a wide sum of one microbatch."""
    sizes = axes.axis_sizes(config, num_devices)
    # `_mesh` reports wrong sizes.
    if not axes.mesh_fills(config, num_devices):
        return
    num_shards = math.prod(sizes[axis] for axis in axes.BATCH_AXES)
    try:
        resolved = batch.resolve_batch(config, num_shards)
    except ConfigError as error:
        yield from error.problems
        return
    rows = resolved.global_batch_size
    if rows > ranges.MAX_ROWS:
        problem = f"comes out as {rows}"
        remedy = f"use at most {ranges.MAX_ROWS}, such as by num_microbatches"
        yield Problem("global_batch_size", config.global_batch_size, problem, remedy)
    dtype = config.precision.grad_sum_dtype
    if dtype != "float32" and resolved.num_microbatches == 1:
        problem = "has no effect with one microbatch"
        remedy = "use float32, or more microbatches"
        yield Problem("precision.grad_sum_dtype", dtype, problem, remedy)


def _precision(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields combinations of dtypes that cannot train."""
    precision = config.precision
    if precision.compute_dtype == "float16" and precision.master_dtype == "bfloat16":
        field = "precision.master_dtype"
        problem = "is less precise than precision.compute_dtype='float16'"
        yield Problem(field, precision.master_dtype, problem, "use float32")
    if precision.compute_dtype == "float16" and precision.matmul_dtype == "float8":
        problem = "cannot run with precision.compute_dtype='float16'"
        remedy = "use 'compute', or compute in bfloat16"
        yield Problem("precision.matmul_dtype", "float8", problem, remedy)
    if precision.compute_dtype == "float16" and precision.on_nonfinite == "update":
        problem = "cannot run with precision.compute_dtype='float16': its loss scale is"
        problem += " found by skipping"
        remedy = "use 'skip' or 'stop', or compute in bfloat16"
        yield Problem("precision.on_nonfinite", "update", problem, remedy)


def _offload(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields memories, dtypes and disks that contradict offload."""
    offload, activations = config.zero.offload, config.model.activation_memory
    if offload is None:
        if activations == "nvme":
            problem = "needs a program per block, and zero.offload=None runs one in all"
            remedy = "use 'pinned_host', or another zero.offload"
            yield Problem("model.activation_memory", activations, problem, remedy)
        return
    if config.precision.reduce_dtype == "float32":
        problem = f"is not built for zero.offload={offload.kind!r}"
        remedy = "use 'compute', or keep the state on the devices"
        yield Problem("precision.reduce_dtype", "float32", problem, remedy)
    memory, paths = offload.parameter_memory, offload.nvme_paths
    on_disk = "nvme" in (offload.kind, memory, offload.gradient_memory, activations)
    if on_disk and not paths:
        problem = "names no directory for arrays stored on 'nvme'"
        remedy = "name a directory on each disk, such as ('/mnt/nvme0',)"
        yield Problem("zero.offload.nvme_paths", (), problem, remedy)
    if paths and not on_disk and not isinstance(offload, schema.AutoOffload):
        problem = "has no effect, as nothing is stored on 'nvme'"
        remedy = "leave it at (), or set zero.offload to 'nvme' or 'auto'"
        yield Problem("zero.offload.nvme_paths", paths, problem, remedy)
    if memory != "device" and (decay := config.optimizer.ema_decay):
        problem = "stores a copy on the devices, despite "
        problem += f"zero.offload.parameter_memory={memory!r}"
        remedy = "use 0, or keep the parameters on the devices too"
        yield Problem("optimizer.ema_decay", decay, problem, remedy)


def _schedule(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields problems of the learning rate by step."""
    chosen, num_steps = config.optimizer.schedule, config.num_steps
    if isinstance(chosen, schema.OneCycle):
        yield from _cycle(chosen, config.optimizer, num_steps)
    elif isinstance(chosen, schema.RangeTest):
        yield from _peak(config.optimizer)
    elif isinstance(chosen, schema.Wsd):
        warmup, fraction = chosen.num_warmup_steps, chosen.decay_fraction
        stable_end = round(num_steps * (1 - fraction))
        if stable_end < warmup <= num_steps:
            field = "optimizer.schedule.num_warmup_steps"
            problem = f"overlaps optimizer.schedule.decay_fraction={fraction} of "
            problem += f"{num_steps} steps"
            yield Problem(field, warmup, problem, f"use at most {stable_end}")


def _peak(optimizer: schema.Optimizer) -> Iterator[Problem]:
    """Yields a peak of a schedule that has none."""
    peak, default = optimizer.peak_learning_rate, schema.Optimizer().peak_learning_rate
    if peak != default:
        problem = "has no effect with optimizer.schedule='range_test'"
        remedy = "set optimizer.schedule.start_learning_rate, or another schedule"
        yield Problem("optimizer.peak_learning_rate", peak, problem, remedy)


def _cycle(
    cycle: schema.OneCycle, optimizer: schema.Optimizer, num_steps: int
) -> Iterator[Problem]:
    """Yields bounds of a one-cycle schedule out of order, and momenta of 1 or more."""
    section, peak = "optimizer.schedule", optimizer.peak_learning_rate
    if (least := cycle.min_learning_rate) > peak:
        problem = f"exceeds optimizer.peak_learning_rate={peak}"
        remedy = f"use at most {peak}"
        yield Problem(f"{section}.min_learning_rate", least, problem, remedy)
    if not (momentum := cycle.momentum):
        return
    section, rule = f"{section}.momentum", optimizer.rule
    if not isinstance(rule, schema.StoredAdam | schema.Lion):
        problem = f"has no effect with optimizer.rule={rule.kind!r}"
        remedy = "leave it out, or set optimizer.rule to 'adamw', 'adam', 'lamb' or "
        yield Problem(section, "cycled_momentum", problem, remedy + "'lion'")
    elif rule.b1 != type(rule)().b1:
        problem = f"has no effect with {section}='cycled_momentum'"
        remedy = f"leave it out, or set {section} to None"
        yield Problem("optimizer.rule.b1", rule.b1, problem, remedy)
    if (least := momentum.min_momentum) > momentum.max_momentum:
        problem = f"exceeds {section}.max_momentum={momentum.max_momentum}"
        remedy = f"use at most {momentum.max_momentum}"
        yield Problem(f"{section}.min_momentum", least, problem, remedy)
    fall = cycle.num_fall_steps
    length = cycle.num_rise_steps + (cycle.num_rise_steps if fall == -1 else fall)
    # Momentum keeps growing after the cycle, and must stay below 1 to the last step.
    after = max(0, num_steps - 1 - length) / cycle.num_decay_steps
    rate = momentum.momentum_decay_rate
    if (last := momentum.max_momentum * (1 + rate * after)) >= 1:
        problem = f"ends at a momentum of {last:.3g} after {num_steps} steps"
        remedy = "use less, or fewer num_steps"
        yield Problem(f"{section}.momentum_decay_rate", rate, problem, remedy)


def _patterns(
    field: str, entries: Sequence[schema.ParamGroup | schema.DimRule | Rule]
) -> Iterator[Problem]:
    """Yields regular expressions that do not compile, or never match."""
    seen: dict[str, str] = {}
    for index, entry in enumerate(entries):
        path = f"{field}[{index}]"
        try:
            re.compile(entry.pattern)
        except re.error as error:
            problem = f"is not a regular expression: {error}"
            remedy = "correct it, or escape characters with \\"
            yield Problem(f"{path}.pattern", entry.pattern, problem, remedy)
        if entry.pattern in seen:
            problem = f"never matches after {seen[entry.pattern]}"
            yield Problem(f"{path}.pattern", entry.pattern, problem, "remove one")
        seen.setdefault(entry.pattern, path)


def _rules(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields problems of the patterns of `mesh.rules`."""
    yield from _patterns("mesh.rules", config.mesh.rules)


def _groups(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields problems of `optimizer.groups`."""
    yield from _patterns("optimizer.groups", config.optimizer.groups)
    for index, group in enumerate(config.optimizer.groups):
        path = f"optimizer.groups[{index}]"
        if group.learning_rate_scale == 0 and group.weight_decay != -1:
            problem = "has no effect on parameters that are frozen"
            remedy = "leave it at -1.0, or a learning_rate_scale above 0"
            yield Problem(f"{path}.weight_decay", group.weight_decay, problem, remedy)


def _rounding(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields problems of `quantize` and of `compress`."""
    for name in ("quantize", "compress"):
        if section := getattr(config, name):
            yield from rounding_rule_problems(f"{name}.rules", section.rules)
    yield from quantize_rules.rounding_problems(config, num_devices)


def rounding_rule_problems(field: str, rules: Sequence[Rule]) -> Iterator[Problem]:
    """Yields patterns and codes of rules of rounding that do not exist."""
    yield from _patterns(field, rules)
    for number, rule in enumerate(rules):
        yield from quantize_rules.rule_problems(f"{field}[{number}]", rule)


def _checkpoint(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields checkpoint settings without effect."""
    path, resume = config.checkpoint.init_from, config.checkpoint.resume
    if path and resume == "required":
        problem = "has no effect with checkpoint.resume='required'"
        remedy = "leave one of them out"
        yield Problem("checkpoint.init_from", path, problem, remedy)
    noise, moe = config.checkpoint.expert_noise, config.model.moe
    if noise and not (path and moe):
        other = "model.moe=None" if path else "checkpoint.init_from=''"
        problem, remedy = f"has no effect with {other}", "leave it at 0.0"
        yield Problem("checkpoint.expert_noise", noise, problem, remedy)
    if config.checkpoint.resize_vocabulary and not path:
        problem, remedy = (
            "has no effect with checkpoint.init_from=''",
            "set it to False",
        )
        yield Problem("checkpoint.resize_vocabulary", True, problem, remedy)


def _prune(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields a start from parts of a larger model that is not named."""
    if not config.prune:
        return
    if not config.checkpoint.init_from:
        problem = "names no larger model to start from"
        remedy = "give the directory of a run or of a Hugging Face checkpoint"
        yield Problem("checkpoint.init_from", "", problem, remedy)
    if config.checkpoint.resize_vocabulary:
        problem = "has no effect with prune, which keeps all tokens"
        yield Problem("checkpoint.resize_vocabulary", True, problem, "set it to False")


def _distill(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields distillation without a teacher, or for no step."""
    distill = config.distill
    if not distill:
        return
    if not distill.teacher:
        problem, remedy = "names no teacher", "give the directory of a run"
        yield Problem("distill.teacher", "", problem, remedy)
    if not distill.num_steps(config.num_steps):
        problem = f"is no step of num_steps={config.num_steps}"
        yield Problem("distill.fraction", distill.fraction, problem, "use more")
    if distill.hidden:
        yield from _compared(config, distill, "hidden")
    if distill.attention:
        yield from _compared(config, distill, "attention")
        yield from _maps(config)


def _compared(
    config: schema.Config, distill: schema.Distill, name: str
) -> Iterator[Problem]:
    """Yields layers of a teacher that blocks of a student cannot be compared with."""
    section: LayerDistance = getattr(distill, name)
    field, until = f"distill.{name}.fraction", distill.fraction
    if section.fraction > until:
        problem = f"ends after the stage of distill.fraction={until}"
        yield Problem(field, section.fraction, problem, f"use at most {until}")
    elif not section.num_steps(config.num_steps):
        problem = f"is no step of num_steps={config.num_steps}"
        yield Problem(field, section.fraction, problem, "use more")
    others = {
        "random_ltd": config.random_ltd is not None,
        "layer_drop": config.layer_drop is not None,
        "mesh.pipeline": config.mesh.pipeline > 1,
        "model.mlp_tiles": config.model.mlp_tiles > 1,
    }
    for other in (other for other, is_set in others.items() if is_set):
        problem = f"splits the layers that distill.{name} compares"
        remedy = f"leave it out, or set distill.{name} to None"
        yield Problem(other, choices.value_at(config, other), problem, remedy)


def _maps(config: schema.Config) -> Iterator[Problem]:
    """Yields attention of a student that is not compared with a teacher's."""
    model, warmup = config.model, config.sequence_warmup
    others = {
        "mesh.sequence": config.mesh.sequence > 1,
        "mesh.tensor": config.mesh.tensor > 1,
        "sequence_warmup": isinstance(warmup, schema.Window),
        "model.attention": isinstance(model.attention, schema.Sparse),
        "model.kind": model.kind != "decoder",
    }
    others |= {f"model.{name}": bool(getattr(model, name)) for name in UNCOMPARED}
    for name in (name for name, is_set in others.items() if is_set):
        problem = "changes the attention that distill.attention compares"
        remedy = "leave it out, or set distill.attention to None"
        yield Problem(name, choices.value_at(config, name), problem, remedy)


def _sinks(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields metric sinks that are named twice."""
    sinks = config.observe.sinks
    for name in dict.fromkeys(sinks):
        if sinks.count(name) > 1:
            problem = f"names {name} {sinks.count(name)} times"
            yield Problem("observe.sinks", sinks, problem, "name it once")


def _processes(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields addresses and numbers of processes that cannot meet."""
    given = config.processes
    host, _, port = given.coordinator.rpartition(":")
    if given.coordinator in ("auto", "none"):
        return
    # Six digits show a port out of range, and bound the text that `int` parses.
    if not host or not port.isdecimal() or not 0 < int(port[:6]) < 2**16:
        field = "processes.coordinator"
        problem, remedy = "is not an address", "use host:port, auto or none"
        yield Problem(field, given.coordinator, problem, remedy)
    if given.num_processes == 0:
        problem = f"gives no number of processes to meet at {given.coordinator}"
        yield Problem("processes.num_processes", 0, problem, "use 1 or more")
    elif not 0 <= given.process_id < given.num_processes:
        problem = f"is not one of {given.num_processes} processes"
        remedy = f"use 0 to {given.num_processes - 1}"
        yield Problem("processes.process_id", given.process_id, problem, remedy)


def uncounted_problems(config: schema.Config, num_devices: int) -> Iterator[Problem]:
    """Yields a problem for `num_epochs` in a run that never counts the rows."""
    if config.num_epochs:
        problem = "needs the number of rows, which only zjax.Trainer counts"
        yield Problem("num_epochs", config.num_epochs, problem, "set num_steps")


_RULES: tuple[model_rules.Entry, ...] = (
    (("mesh",), _mesh),
    (("global_batch", "num_microbatches", "microbatch", "mesh", "rl"), _batch),
    (("global_batch", "num_microbatches", "microbatch", "mesh"), layers.stage_problems),
    ((), _precision),
    ((), _offload),
    (("mesh",), replicas.node_problems),
    (("num_epochs",), uncounted_problems),
    (("num_steps", "optimizer"), _schedule),
    (("num_steps", "optimizer", "mesh"), replicas.communication_problems),
    (
        ("num_steps", "optimizer", "mesh", "communication"),
        replicas.local_steps_problems,
    ),
    ((), _rules),
    ((), _groups),
    (("lora", "mesh"), parameters.adapter_problems),
    ((), _rounding),
    ((), _checkpoint),
    ((), _prune),
    (("num_steps", "distill"), _distill),
    (
        ("data", "mesh", "num_steps", "random_ltd", "layer_drop"),
        dropping.dropping_problems,
    ),
    (("data", "model", "preference"), preference_rules.preference_problems),
    (("rl", "global_batch", "data", "model", "lora"), rl_rules.rl_problems),
    ((), _sinks),
    (("processes",), _processes),
    ((), effect.effect_problems),
)
