"""Sections of metric sinks, and keys that zjax does not read or support."""

from zjax.deepspeed import table
from zjax.deepspeed.table import If, Meanings, No, Section, Values, derived, refusal

SINKS = {"tensorboard": "tensorboard", "wandb": "wandb", "csv_monitor": "csv"}
FILES = {"enabled": If(None), "output_path": "", "job_name": ""}
NO_EFFECT = {
    "wall_clock_breakdown": "metrics have the seconds of a step; see observe.profile",
    "memory_breakdown": "zjax plan prints the memory of every array",
    "dump_state": "zjax train prints its settings",
    "log_level": "absl flags set it, as --verbosity=1",
    "zero_allow_untested_optimizer": "ZeRO shards the state of any optimizer",
    "zero_force_ds_cpu_optimizer": "updates run on the device",
    "managed_gradient_accumulation": "a step has all microbatches",
    "disable_allgather": "XLA chooses the messages",
    "allgather_size": "XLA combines the messages",
    "vocabulary_size": "the model has it",
    "graph_harvesting": "XLA compiles the step",
    "dataloader_drop_last": "each batch has global_batch_size rows",
}
COMPILE = (
    *("deepcompile", "free_activation", "offload_activation", "offload_opt_states"),
    *("offload_activation_pin_memory", "double_buffer", "symmetric_memory"),
    *("debug_log", "offload_parameters", "sync_before_reduce", "sync_after_reduce"),
    *("sync_before_allgather", "sync_after_allgather", "keep_int_input_tensors"),
    "keep_all_input_tensors",
)
COMET = ("project", "workspace", "api_key", "experiment_name", "experiment_key")
COMET += ("online", "mode")
WANDB = {"enabled": If(None), "group": None, "team": None, "project": ""}
TUNED = derived("zjax tune --ds_config=FILE tries what it would try")
UNREAD = {
    "comms_logger": "zjax plan --collectives lists what a step sends",
    "flops_profiler": "metrics have mfu; observe.profile takes a trace",
    "timers.throughput": "metrics have the seconds of each step",
    "timers": "metrics have the seconds of each step",
    "compile": "XLA compiles the step",
    "datastates_ckpt": "checkpoints are written in the background",
    "data_types": "masters are float32, or as precision.master_dtype says",
}
"""Reasons why sections are not needed."""
CHECKED = {
    "comms_logger": dict.fromkeys(("enabled", "verbose", "debug"), False)
    | {"prof_all": True, "prof_ops": []},
    "timers.throughput": {"enabled": True, "synchronized": True},
    "compile": dict.fromkeys(COMPILE, False)
    | {"free_activation_threshold": 10_485_760, "passes": None},
    "comet": {"enabled": False, "samples_log_interval": 100} | dict.fromkeys(COMET),
}
"""Keys of sections that are not read, which DeepSpeed checks."""
UNSUPPORTED = {
    "amp": "use bf16.enabled",
    "nebula": "leave it out: checkpoints are written in the background",
    "compression_training": "leave it out",
    "quantize_training": "leave it out",
    "weight_quantization": "leave it out",
    "eigenvalue": "leave it out",
    "hybrid_engine": "leave it out",
    "comet": "use tensorboard, wandb or csv_monitor",
}
"""Remedies of sections that are refused if they are on."""
ON_BY_DEFAULT = ("weight_quantization",)
"""Sections of `UNSUPPORTED` that are on unless the file turns them off."""


def _sink(values: Values) -> Meanings | str:
    """Meanings of a section of a metric sink."""
    sinks = [
        sink for section, sink in SINKS.items() if values.found[f"{section}.enabled"]
    ]
    written = derived("metrics are written to the directory of the run")
    meanings: Meanings = {
        # The setting replaces the default, which has the first two.
        "enabled": {"observe.sinks": ("console", "jsonl", *sinks)},
    }
    if values.path == "wandb" and values["project"]:
        meanings["project"] = {"observe.project": values["project"]}
    return meanings | dict.fromkeys(("output_path", "job_name"), written)


def _unsupported(values: Values) -> Meanings | str:
    """Meaning of a section that is refused, as a whole, if a switch in it is on."""
    found, name = values.found, values.path
    inside = found.inside(name)
    switches = [
        found.is_auto(key) or found.value(key, False)
        for key in inside
        if key.endswith("enabled")
    ]
    is_on = any(switches) or (name in ON_BY_DEFAULT and not switches)
    if not is_on or not found.given(name):
        return "it is off"
    found.need(name, "is not supported", UNSUPPORTED[name])
    refused = table.Outcome("not supported", UNSUPPORTED[name])
    return {"": refused, "*": refused}


def _checkpoint(values: Values) -> Meanings | str:
    """Meanings of `checkpoint`."""
    modes, why = ("ignore", "warn", "fail"), "a checkpoint opens on any mesh"
    unknown = refusal(f"use one of {', '.join(modes)}", "is not a choice")
    known = values["tag_validation"].lower() in modes
    return {"tag_validation": why if known else unknown, "*": why}


SECTIONS = (
    *(
        Section(
            name,
            WANDB if name == "wandb" else FILES,
            _sink,
            rest=refusal("leave it out"),
            is_strict=True,
        )
        for name in SINKS
    ),
    Section("autotuning", rest=TUNED),
    *(
        Section(name, CHECKED.get(name, {}), _unsupported, is_strict=name in CHECKED)
        for name in UNSUPPORTED
    ),
    Section("checkpoint", {"tag_validation": "warn"}, _checkpoint),
    *(
        Section(name, CHECKED.get(name, {}), rest=why, is_strict=name in CHECKED)
        for name, why in UNREAD.items()
    ),
    Section("", {key: No(why) for key, why in NO_EFFECT.items()}),
)
