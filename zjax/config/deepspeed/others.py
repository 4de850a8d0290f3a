"""Where metrics go, and sections that need nothing or cannot be honoured."""

from zjax.config.deepspeed.conversion import Conversion

SINKS = {"tensorboard": "tensorboard", "wandb": "wandb", "csv_monitor": "csv"}
NO_EFFECT = {
    "wall_clock_breakdown": "metrics have the seconds of a step; see observe.profile_*",
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
"""Keys that need nothing."""
SECTIONS = {
    "comms_logger": "zjax plan --collectives lists what a step sends",
    "flops_profiler": "metrics have mfu; observe.profile_start_step takes a trace",
    "timers": "metrics have the seconds of each step",
    "checkpoint": "a checkpoint opens on any mesh",
    "compile": "XLA compiles the step",
    "datastates_ckpt": "checkpoints are written in the background",
    "data_types": "masters are float32, or as precision.master_dtype says",
}
"""Sections that need nothing."""
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
"""Sections that are refused if they are on, with a remedy."""
ON_BY_DEFAULT = ("weight_quantization",)
"""Those of them that are on where the file does not say so."""


def convert_others(found: Conversion) -> None:
    """Reads the rest of the file."""
    _convert_sinks(found)
    for key in found.inside("autotuning"):
        found.derive(key, "zjax tune --ds_config=FILE tries what it would try")
    found.skip("autotuning", "it is empty")
    for section, remedy in UNSUPPORTED.items():
        if not found.given(section):
            continue
        inside = found.inside(section) or [section]
        switches = [found.get(k, False) for k in inside if k.endswith("enabled")]
        if any(switches) or (section in ON_BY_DEFAULT and not switches):
            found.refuse_section(section, remedy)
        for key in inside:
            found.skip(key, "its section is off")
    for section, why in SECTIONS.items():
        found.skip_rest(section, why)
        found.skip(section, why)
    for key, why in NO_EFFECT.items():
        found.skip(key, why)


def _convert_sinks(found: Conversion) -> None:
    sinks = ["console", "jsonl"]
    for section, sink in SINKS.items():
        if found.take(f"{section}.enabled", False):
            sinks.append(sink)
            found.set(f"{section}.enabled", observe__sinks=tuple(sinks))
            for name in ("output_path", "job_name"):
                key = f"{section}.{name}"
                found.derive(key, "metrics are written to the directory of the run")
            given = sink == "wandb" and found.given("wandb.project")
            if given and (project := found.take("wandb.project", "deepspeed")):
                found.set("wandb.project", observe__project=project)
            for key in found.inside(section):
                found.refuse(key, "leave it out")
        found.skip_rest(section, "its section is off")
