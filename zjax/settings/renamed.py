"""Old names of settings, which are read for one release, and told."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from absl import logging


class Moved(NamedTuple):
    """Place to which a setting has moved."""

    path: str
    values: Mapping[Any, Any] = {}
    """Present values by old values, where a value is written differently."""


def _moved(old: str, new: str, *names: str) -> dict[str, Moved]:
    """Places of settings of a section that kept their names."""
    return {f"{old}.{name}": Moved(f"{new}.{name}") for name in names}


MOVED: dict[str, Moved] = {
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
    "model.rope_scaling": Moved("model.positions.scaling"),
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


MEMORIES: Mapping[str, Mapping[str, str] | None] = {
    memory: {"kind": memory, "gradient_memory": gradients, "parameter_memory": params}
    for memory, gradients, params in (
        ("pinned_host", "pinned_host", "device"),
        ("nvme", "pinned_host", "pinned_host"),
        ("auto", "device", "device"),
    )
} | {"device": None}
"""Offload by old values of `zero.memory`."""

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


def moved(
    values: Mapping[str, Any], section: str = ""
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits nested settings into settings under present names, and moves by path.

    Example:
        >>> moved({"optimizer": {"name": "lion", "weight_decay": 0.0}})
        ({'optimizer': {'weight_decay': 0.0}}, {'optimizer.rule': 'lion'})
    """
    kept, found = dict[str, Any](), dict[str, Any]()
    for name, value in values.items():
        path = f"{section}{name}"
        if isinstance(value, Mapping):
            inner, below = moved(value, f"{path}.")
            found |= below
            if inner or path not in SECTIONS:
                kept[name] = inner
            continue
        new = place(path)
        # Types are compared as well: False == 0, but False is refused.
        offs = [(type(x), x) for x in SWITCHES.get(new.path, ())]
        if (type(value), value) in offs:
            off = new.path.rpartition(".")[0]
            _tell(f"{path}={value!r}", f"{off}=None")
            found[off] = None
        elif new.path != path:
            _tell(path, new.path)
            is_known = isinstance(value, bool | int | str) and value in new.values
            # Not over None: a switch beside this setting is off.
            found.setdefault(new.path, new.values[value] if is_known else value)
        else:
            kept[name] = value
    for name in [name for name in kept if f"{section}{name}" == "zero.memory"]:
        _tell("zero.memory", "zero.offload")
        # Kept, as other old names of `zero` win over what this one stood for.
        memory = kept.pop(name)
        offload = MEMORIES.get(f"{memory}", memory)
        kept[name.removesuffix("memory") + "offload"] = offload
    # Last, as None drops the settings of its section.
    return kept, dict(sorted(found.items(), key=lambda item: item[1] is None))


def place(path: str) -> Moved:
    """Place of a setting, which may have an old name or stand in a moved section."""
    if path in MOVED:
        return MOVED[path]
    section, _, name = path.rpartition(".")
    return Moved(f"{SECTIONS[section]}.{name}" if section in SECTIONS else path)


@functools.cache  # once per process
def _tell(old: str, new: str) -> None:
    """Logs that a setting has another name, or is written differently."""
    text = "%s is now %s; the old name is read in this release only"
    logging.warning(text, old, new)
