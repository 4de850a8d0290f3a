"""Converts batch sizes, clipping, mesh, recomputation, sinks and remaining sections."""

import math

from zjax.deepspeed.conversion import AUTO, Conversion

GLOBAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
SUMS = "gradient_accumulation_steps"
FIELDS = {
    GLOBAL: "global_batch_size",
    MICRO: "microbatch_size",
    SUMS: "num_microbatches",
}
ELASTIC = "elasticity"
OLD_CLIPPING = "its default since June 2026; older releases did not clip"


def convert_steps(found: Conversion) -> None:
    """Converts batch sizes, clipping and reports."""
    if found.take(f"{ELASTIC}.enabled", False):
        _convert_elastic(found)
    else:
        _convert_batch(found)
        found.skip_rest(ELASTIC, "its section is off")
    clip = found.take("gradient_clipping", 1.0)
    if clip is not None:
        since = "" if found.given("gradient_clipping") else OLD_CLIPPING
        # 0 turns clipping off in DeepSpeed.
        norm = clip or math.inf
        found.set("gradient_clipping", since, default=clip, optimizer__clip_norm=norm)
    every = found.get("steps_per_print", 0.0)
    if every == math.inf:
        found.skip("steps_per_print", "it never prints; metrics are as the run says")
    elif every := found.take("steps_per_print", 0):
        found.set("steps_per_print", observe__log_every_steps=every)
    else:
        found.skip("steps_per_print", "metrics are written as the run says")
    if found.take("gradient_allreduce_op", "mean") == "mean":
        found.skip("gradient_allreduce_op", "gradients are means")
    else:
        found.refuse("gradient_allreduce_op", "use 'mean', and scale the learning rate")
    remedy = "leave it out: gradients are dense"
    found.refuse_if_on("sparse_gradients", remedy, "gradients are dense")


def _convert_batch(found: Conversion) -> None:
    """Converts batch sizes, of which zjax derives the third from two.

    As in DeepSpeed, a step has one microbatch if no key says otherwise.
    """
    sizes = {key: found.take(key, 0) for key in FIELDS}
    for key, size in sizes.items():
        if size:
            found.set(key, **{FIELDS[key]: size})
    if None in sizes.values() or any(map(found.is_faulty, sizes)):
        return
    if not sizes[GLOBAL] and not sizes[MICRO]:
        found.require(GLOBAL, "is not given", f"give it, or {MICRO}")
    elif not sizes[GLOBAL]:
        # 0 derives the size from the device batch, in place of zjax's default.
        found.settings["global_batch_size"] = 0
    if not sizes[SUMS] and not (sizes[GLOBAL] and sizes[MICRO]):
        found.set(SUMS, default=1, num_microbatches=1)


def _convert_elastic(found: Conversion) -> None:
    """Converts elastic batch sizes, which follow from the number of devices."""
    found.set(f"{ELASTIC}.enabled", "the devices give all batch sizes")
    found.settings |= dict.fromkeys(FIELDS.values(), 0)
    ignores = found.take(f"{ELASTIC}.ignore_non_elastic_batch_info", False)
    found.skip(f"{ELASTIC}.ignore_non_elastic_batch_info", "no other size is used")
    for key in FIELDS:
        if ignores:
            found.skip(key, "elasticity gives it")
        else:
            remedy = "leave it out, or set elasticity.ignore_non_elastic_batch_info"
            found.refuse(key, remedy, "is given by elasticity")
    for name in ("max_train_batch_size", "micro_batch_sizes"):
        if not found.given(f"{ELASTIC}.{name}"):
            found.require(f"{ELASTIC}.{name}", "is not given", "give it")
    _convert_micro_batches(found)
    for name, (setting, default) in _ELASTIC.items():
        found.copy(f"{ELASTIC}.{name}", setting, default, tells_default=False)
    # Version 0.1 has no nodes: 0 selects its rule in zjax.
    version, nodes = found.take(f"{ELASTIC}.version", 0.2), 0
    if version == 0.2:
        nodes = found.take(f"{ELASTIC}.num_gpus_per_node", 1) or 1
    elif version not in (None, 0.1):
        found.refuse(f"{ELASTIC}.version", "use 0.1 or 0.2")
    found.settings["elasticity.shards_per_node"] = nodes
    said = f"elasticity.shards_per_node={nodes}"
    found.derive(f"{ELASTIC}.version", said)
    found.derive(f"{ELASTIC}.num_gpus_per_node", said)
    key = f"{ELASTIC}.model_parallel_size"
    if found.take(key, 1) not in (None, 1):
        found.refuse(key, f"use 1, or give {GLOBAL} in place of elasticity")
    found.skip(key, "a batch shard is one device")
    found.skip(f"{ELASTIC}.min_time", "DeepSpeed does not use it")


def _convert_micro_batches(found: Conversion) -> None:
    """Converts the list of elastic microbatch sizes."""
    key = f"{ELASTIC}.micro_batch_sizes"
    sizes = found.take(key, [2, 4, 6], list)
    if sizes is None:
        return
    if sizes and all(isinstance(n, int) and n > 0 for n in sizes):
        found.set(key, elasticity__microbatch_sizes=tuple(sizes))
    else:
        found.refuse(key, "write whole numbers above 0, as [2, 4]", "is not a list")


_ELASTIC = {
    "max_train_batch_size": ("elasticity__max_batch_size", 2_000),
    "min_gpus": ("elasticity__min_shards", 1),
    "max_gpus": ("elasticity__max_shards", 10_000),
    "prefer_larger_batch": ("elasticity__prefer_larger", True),
}
ELASTIC_KEYS = (
    *_ELASTIC,
    *("micro_batch_sizes", "min_time", "version", "num_gpus_per_node"),
    *("ignore_non_elastic_batch_info", "model_parallel_size"),
)
"""Keys of `elasticity`."""


CHECKPOINTS = "activation_checkpointing"


def convert_parallel(found: Conversion) -> None:
    """Converts sizes of the mesh and `activation_checkpointing`."""
    _convert_tensor(found)
    _convert_pipeline(found)
    axes = {
        "sequence_parallel_size": "mesh__sequence",
        "data_parallel_size": "mesh__data",
    }
    for key, setting in axes.items():
        if size := found.take(key, 0):
            found.set(key, **{setting: size})
    _convert_experts(found)
    _convert_recomputation(found)


def _convert_tensor(found: Conversion) -> None:
    """Converts `tensor_parallel`."""
    section = "tensor_parallel"
    nested = [f"{section}.{name}.tp_size" for name in ("tp", "tensor_parallel")]
    for key in (f"{section}.autotp_size", *nested):
        size = found.take(key, 0)
        if size and size > 1:
            found.set(key, mesh__tensor=size)
        else:
            found.skip(key, "one device holds each matrix")
    found.skip_rest(section, "names of dims place the matrices; see mesh.rules")


def _convert_pipeline(found: Conversion) -> None:
    """Converts `pipeline`."""
    stages = found.take("pipeline.stages", "auto", int, str)
    if isinstance(stages, int) and stages > 1:
        found.set("pipeline.stages", mesh__pipeline=stages)
    elif stages not in (1, AUTO):
        found.refuse("pipeline.stages", "use 1 or more, or auto", "is no number")
    if found.take("pipeline.activation_checkpoint_interval", 0):
        found.set("pipeline.activation_checkpoint_interval", model__remat="full")
    found.skip_rest("pipeline", "stages have equally many layers")


def _convert_experts(found: Conversion) -> None:
    """Converts `expert_parallel`."""
    section = "expert_parallel"
    if found.take(f"{section}.enabled", False):
        size = found.take(f"{section}.autoep_size", 1)
        found.set(f"{section}.enabled", "model.moe describes the experts")
        if size is not None:
            found.set(f"{section}.autoep_size", mesh__expert=size)
    found.skip_rest(section, "model.moe describes the experts")
    key = "use_data_before_expert_parallelism"
    found.skip(key, "the mesh has one order of its axes")


def _convert_recomputation(found: Conversion) -> None:
    """Converts `activation_checkpointing`."""
    key = f"{CHECKPOINTS}.cpu_checkpointing"
    if found.take(key, False):
        found.set(key, model__activation_memory="pinned_host", model__remat="full")
    else:
        found.skip(key, "inputs of layers stay on the devices")
    key = f"{CHECKPOINTS}.partition_activations"
    if found.take(key, False):
        found.derive(key, "activations are sharded as the mesh shards them")
    found.skip_rest(CHECKPOINTS, "model.remat says what is recomputed")


SINKS = {"tensorboard": "tensorboard", "wandb": "wandb", "csv_monitor": "csv"}
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
"""Reasons why keys are not needed."""
SECTIONS = {
    "comms_logger": "zjax plan --collectives lists what a step sends",
    "flops_profiler": "metrics have mfu; observe.profile takes a trace",
    "timers": "metrics have the seconds of each step",
    "checkpoint": "a checkpoint opens on any mesh",
    "compile": "XLA compiles the step",
    "datastates_ckpt": "checkpoints are written in the background",
    "data_types": "masters are float32, or as precision.master_dtype says",
}
"""Reasons why sections are not needed."""
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


def convert_others(found: Conversion) -> None:
    """Converts metric sinks and all sections that no other converter reads."""
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
    # Keys that were converted above keep their verdict.
    for section, why in SECTIONS.items():
        found.skip_rest(section, why)
        found.skip(section, why)
    for key, why in NO_EFFECT.items():
        found.skip(key, why)


def _convert_sinks(found: Conversion) -> None:
    """Converts metric sinks."""
    # observe.sinks replaces the default, which has these two.
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
