"""Old names of settings, which are read for one release, and told."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from absl import logging

from zjax.settings.choices import KIND, NONE


class Moved(NamedTuple):
    """Place to which a setting has moved."""

    path: str
    values: Mapping[Any, Any] = {}
    """Present values by old values, where a value is written differently."""


def _moved(old: str, new: str, *names: str) -> dict[str, Moved]:
    """Places of settings that moved with the section under equal names."""
    return {f"{old}.{name}": Moved(f"{new}.{name}") for name in names}


MEMORY = "zero.memory"
"""Old name of a preset, whose values are defaults of other old names."""
_OFF: Mapping[Any, None] = {None: None, "": None, NONE: None}
"""Values that stand for no section, by old names of a choice that had them."""

MOVED: dict[str, Moved] = {
    MEMORY: Moved("zero.offload"),
    "optimizer.name": Moved("optimizer.rule"),
    **_moved(
        "optimizer",
        "optimizer.rule",
        *("b1", "b2", "eps", "bias_correction", "moment_dtype", "freeze_step"),
        *("var_update_scaler", "local_step_scaler", "local_step_clipper"),
    ),
    **_moved(
        "optimizer",
        "optimizer.schedule",
        *("num_warmup_steps", "warmup", "decay_fraction"),
    ),
    "optimizer.final_learning_rate_fraction": Moved(
        "optimizer.schedule.final_fraction"
    ),
    "optimizer.cycle.cycles_momentum": Moved(
        "optimizer.schedule.momentum", {True: "cycled_momentum", False: None}
    ),
    **_moved(
        "optimizer.cycle",
        "optimizer.schedule.momentum",
        *("min_momentum", "max_momentum", "momentum_decay_rate"),
    ),
    "communication.num_local_steps": Moved("communication.local_steps.num_steps"),
    **_moved(
        "communication",
        "communication.local_steps",
        *("num_synchronous_steps", "outer_learning_rate", "outer_momentum"),
        *("num_fragments", "delay", "mixing"),
    ),
    "pipeline.schedule": Moved("pipeline"),
    "zero.optimizer_memory": Moved("zero.offload", {"device": None}),
    **_moved(
        "zero",
        "zero.offload",
        *("parameter_memory", "gradient_memory", "nvme_paths", "delay_updates_from"),
    ),
    "zero.shard_over_replica": Moved("zero.replicas", {True: "sharded", False: None}),
    **_moved(
        "zero",
        "zero.replicas",
        *("secondary_partition", "quantized_weights", "quantized_gradients"),
    ),
    "lora.block_size": Moved("lora.quantize.block_size"),
    **_moved("evaluation", "evaluation.early_stopping", "patience", "min_improvement"),
    "observe.profile_start_step": Moved("observe.profile.start_step"),
    "observe.profile_num_steps": Moved("observe.profile.num_steps"),
    "model.rope_theta": Moved("model.positions.theta"),
    "model.rope_scaling": Moved("model.positions.scaling", _OFF),
    "model.rotary_size": Moved("model.positions.size"),
    "model.rotary_pairs": Moved("model.positions.pairs"),
    "model.max_positions": Moved("model.positions.max_positions"),
    "model.first_position": Moved("model.positions.first"),
    "model.sliding_window": Moved("model.window.size"),
    "model.full_attention_every": Moved("model.window.full_attention_every"),
    "model.local_rope_theta": Moved("model.window.rope_theta"),
    "model.sparsity.mode": Moved("model.attention.pattern"),
    "model.sparsity.block": Moved("model.attention.block"),
    "model.moe.choice": Moved(
        "model.moe", {"tokens": "token_choice", "experts": "expert_choice"}
    ),
    **{
        f"{name}.form": Moved(name, {"none": None})
        for name in ("sequence_warmup", "buckets", "random_ltd")
    },
    **_moved("buckets", "buckets.order", "weights", "num_cycles"),
}
"""Places of settings by old paths."""

SECTIONS = {
    "optimizer.cycle": "optimizer.schedule",
    "optimizer.range_test": "optimizer.schedule",
    "model.sparsity": "model.attention.pattern",
    "model.rope_scaling": "model.positions.scaling",
    "buckets.pacing": "buckets.order.pacing",
}
"""Sections by old paths, for settings that kept their names."""


MEMORIES: Mapping[str, Mapping[str, str]] = {
    memory: {
        "zero.optimizer_memory": memory,
        "zero.gradient_memory": gradients,
        "zero.parameter_memory": parameters,
    }
    for memory, gradients, parameters in (
        ("pinned_host", "pinned_host", "device"),
        ("nvme", "pinned_host", "pinned_host"),
        ("auto", "device", "device"),
    )
} | {"device": {"zero.optimizer_memory": "device"}}
"""Settings under old names by values of `MEMORY`."""
_DERIVED = [(name, "derived") for name in MEMORIES["nvme"]]
"""Old names with values that stood for the preset."""

SWITCHES: dict[str, tuple[Any, ...]] = {
    "elasticity.microbatch_sizes": ((), []),
    "model.latent.key_rank": (0,),
    "model.window.size": (0,),
    "distill.teacher": ("",),
    "layer_drop.theta": (1.0, 1),
    "lora.rank": (0,),
    "communication.local_steps.num_steps": (0,),
    "evaluation.early_stopping.patience": (0,),
    "observe.profile.start_step": (-1,),
    "model.moe.num_experts": (0, (), []),
}
"""Old values of settings that stood for a section of None."""

UNREAD = {"model.moe.balance_loss": 0.0, "pipeline.recompute": False}
"""Values, by settings that a choice does not read, that say what the choice does.

Old configs had to write them.
"""


class Old(NamedTuple):
    """Setting under an old name, or an old value that switched a section off."""

    name: str
    value: Any
    path: str
    """Present path: a setting, or a choice between sections."""
    present: Any
    """Present value; None switches the section at `path` off."""


def find(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Old]]:
    """Splits nested settings into settings under present names, and under old names.

    Example:
        >>> kept, (old,) = find({"optimizer": {"name": "lion", "weight_decay": 0.0}})
        >>> kept, old.path, old.present
        ({'optimizer': {'weight_decay': 0.0}}, 'optimizer.rule', 'lion')
    """
    kept, found = _split(values, "")
    found = [x for x in found if (x.name, x.value) not in _DERIVED]
    given = {old.name for old in found}
    for old in [old for old in found if old.name == MEMORY]:
        for name, x in MEMORIES.get(f"{old.value}", {}).items():
            if name not in given:
                new = place(name)
                found.append(old._replace(path=new.path, present=_present(new, x)))
        if f"{old.value}" in MEMORIES:
            found.remove(old)
    return kept, found


def without_presets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces `MEMORY` by the settings that it stands for and that are not set."""
    zero = dict(values["zero"])
    presets = MEMORIES.get(f"{zero.pop('memory')}", {})
    named = {name.removeprefix("zero."): x for name, x in presets.items()}
    return {**values, "zero": named | zero}


def _split(values: Mapping[str, Any], section: str) -> tuple[dict[str, Any], list[Old]]:
    """Splits settings of a section as `find` does, with presets unresolved."""
    kept, found = dict[str, Any](), list[Old]()
    for name, value in values.items():
        path = f"{section}{name}"
        new = place(path)
        if isinstance(value, Mapping):
            inner, below = _split(value, f"{path}.")
            found += below
            if inner or path not in SECTIONS:
                kept[name] = inner
        elif is_one_of(value, SWITCHES.get(new.path, ())):
            found.append(Old(path, value, new.path.rpartition(".")[0], None))
        elif new.path != path:
            found.append(Old(path, value, new.path, _present(new, value)))
        else:
            kept[name] = value
    return kept, found


def _present(new: Moved, value: Any) -> Any:
    """Present value of a moved setting; a value that is written alike is unchanged."""
    known = (x for old, x in new.values.items() if is_one_of(value, (old,)))
    return next(known, value)


def is_one_of(value: Any, values: Iterable[Any]) -> bool:
    """Whether a value is one of some, of the same type: False == 0, but is no int."""
    return any(type(value) is type(x) and value == x for x in values)


def place(path: str) -> Moved:
    """Place of a setting, which may have an old name or stand in a moved section."""
    if path in MOVED:
        return MOVED[path]
    section, _, name = path.rpartition(".")
    if section not in SECTIONS:
        return Moved(path)
    new = SECTIONS[section]
    return Moved(new, _OFF) if name == KIND else Moved(f"{new}.{name}")


def warn(old: Old) -> None:
    """Logs once that a setting has another name, or is written differently."""
    if old.path == place(old.name).path.rpartition(".")[0]:  # a switch that is off
        _tell(f"{old.name}={old.value!r}", f"{old.path}=None")
    else:
        _tell(old.name, place(old.name).path)


@functools.cache  # once per process
def _tell(old: str, new: str) -> None:
    """Logs that a setting has another name, or is written differently."""
    text = "%s is now %s; the old name is read in this release only"
    logging.warning(text, old, new)
