"""Converts ZeRO, offload and ZeRO++."""

from zjax.deepspeed.conversion import AUTO, Conversion

ZERO = "zero_optimization"
MEMORIES = {"none": "device", "cpu": "pinned_host", "nvme": "nvme"}
STAGE_3 = "stage3_"
"""Prefix of names that DeepSpeed knows without it as well."""
SCHEDULED = "XLA schedules and combines the messages"
SHARDED = "shardings replace flat buffers"
NO_EFFECT = {
    "overlap_comm": SCHEDULED,
    "allgather_bucket_size": SCHEDULED,
    "reduce_bucket_size": SCHEDULED,
    "stage3_prefetch_bucket_size": SCHEDULED,
    "stage3_max_live_parameters": SCHEDULED,
    "stage3_max_reuse_distance": SCHEDULED,
    "stage3_module_granularity_threshold": SCHEDULED,
    "stage3_use_all_reduce_for_fetch_params": SCHEDULED,
    "stage3_allgather_sequential": SCHEDULED,
    "use_multi_rank_bucket_allreduce": SCHEDULED,
    "allgather_partitions": SCHEDULED,
    "reduce_scatter": SCHEDULED,
    "contiguous_gradients": SHARDED,
    "round_robin_gradients": SHARDED,
    "sub_group_size": "updates run array by array",
    "stage3_model_persistence_threshold": "small arrays stay whole, however many",
    "load_from_fp32_weights": "a checkpoint holds the masters",
    "elastic_checkpoint": "a checkpoint opens on any mesh",
    "ignore_unused_parameters": "unused parameters have zero gradients",
    "stage3_gather_16bit_weights_on_model_save": "zjax export gathers weights",
    "stage3_gather_fp16_weights_on_model_save": "zjax export gathers weights",
    "memory_efficient_linear": "XLA compiles the layers",
    "pipeline_loading_checkpoint": "arrays are read onto their shards",
    "override_module_apply": "models are functions",
    "log_trace_cache_warnings": "nothing is traced at run time",
    "enable_sanity_checks": "shardings are checked before a run",
    "save_muon_momentum_buffer_in_memory": "zero.optimizer_memory places all state",
    "grad_hooks": "gradients are values",
    "cpu_offload_use_pin_memory": "host memory is pinned",
}
COUNTS = (
    *("allgather_bucket_size", "reduce_bucket_size", "stage3_prefetch_bucket_size"),
    *("stage3_max_live_parameters", "stage3_max_reuse_distance", "sub_group_size"),
    *("stage3_module_granularity_threshold", "stage3_model_persistence_threshold"),
)
"""Keys of `NO_EFFECT` that are whole numbers; further keys are switches."""
OFFLOAD_NO_EFFECT = {
    "pin_memory": "host memory is pinned",
    "buffer_count": "buffers follow from the arrays",
    "buffer_size": "buffers follow from the arrays",
    "max_in_cpu": "arrays that fit stay in memory",
    "fast_init": "arrays are made where they stay",
    "pipeline_read": "reads overlap the update",
    "pipeline_write": "writes overlap the update",
    "cpuadam_cores_perc": "updates run on the device",
}
AIO = ("block_size", "queue_depth", "intra_op_parallelism", "thread_count")
AIO += ("single_submit", "overlap_events", "use_gds")


def convert_zero(found: Conversion) -> None:
    """Converts `zero_optimization` and `aio`."""
    _convert_persistence(found, _convert_stage(found))
    _convert_offload(found, "offload_optimizer", "optimizer_memory")
    _convert_offload(found, "offload_param", "parameter_memory")
    _convert_aliases(found)
    _convert_across_nodes(found)
    # Keys that were converted above keep their verdict.
    for name, why in NO_EFFECT.items():
        found.skip(f"{ZERO}.{name}", why)
        found.skip(f"{ZERO}.{name.removeprefix(STAGE_3)}", why)
    found.refuse_if_on(f"{ZERO}.legacy_stage1", "leave it out")
    for key in found.inside(f"{ZERO}.zenflow"):
        found.refuse(key, "leave it out; zero.delay_updates_from overlaps updates, too")
    found.skip_rest(f"{ZERO}.leaf_module", "experts are one array")
    for name in AIO:
        found.skip(
            f"aio.{name}", "requests follow from the disks; see zjax bench --nvme"
        )


def _convert_persistence(found: Conversion, stage: int | None) -> None:
    """Converts the threshold below which stage 3 does not shard parameters."""
    name = f"{STAGE_3}param_persistence_threshold"
    for key in (f"{ZERO}.{name}", f"{ZERO}.{name.removeprefix(STAGE_3)}"):
        if stage not in (3, None):
            found.skip(key, "the stage is below 3")
        elif found.given(key) and (least := found.take(key, 100_000)) is not None:
            found.set(key, zero__min_shard_elements=least)


def _convert_stage(found: Conversion) -> int | None:
    """Converts the ZeRO stage; None if the run decides."""
    if found.get(ZERO, {}, bool) is True:
        found.set(ZERO, "a true section is stage 1", zero__stage=1)
        return 1
    key = f"{ZERO}.stage"
    stage = found.take(key, 0)
    if stage is None:
        return None
    found.set(key, default=0, zero__stage=stage)
    found.skip(ZERO, "the section is empty")
    return stage


def _convert_offload(found: Conversion, section: str, setting: str) -> None:
    """Converts offload of the optimizer state or of parameters."""
    prefix = f"{ZERO}.{section}"
    device = found.take(f"{prefix}.device", "none")
    for name, why in OFFLOAD_NO_EFFECT.items():
        found.skip(f"{prefix}.{name}", why)
    if device not in MEMORIES:
        if device is not None:
            found.refuse(f"{prefix}.device", f"use one of {', '.join(MEMORIES)}")
        return
    ratio = found.take(f"{prefix}.ratio", 1.0)
    if ratio == 1.0:
        found.skip(f"{prefix}.ratio", "all of it")
    elif ratio is not None and device == "cpu":
        note = "as much stays on the devices as is free there"
        found.set(f"{prefix}.ratio", note, zero__optimizer_memory="auto")
        found.derive(f"{prefix}.device", "see ratio")
        device = ""
    if device:
        found.set(f"{prefix}.device", **{f"zero__{setting}": MEMORIES[device]})
    path = found.take(f"{prefix}.nvme_path", "")
    if path and device == "nvme":
        found.set(f"{prefix}.nvme_path", zero__nvme_paths=(path,))
    else:
        found.skip(f"{prefix}.nvme_path", "nothing is stored on a disk")
    found.refuse_if_on(f"{prefix}.super_offload", "leave it out")
    dropped = "DeepSpeed drops 'auto' there: " * (found.get(prefix, "", str) == AUTO)
    found.skip(prefix, f"{dropped}nothing is offloaded")


def _convert_aliases(found: Conversion) -> None:
    """Converts names of older releases."""
    aliases = {
        "cpu_offload": "zero__optimizer_memory",
        "cpu_offload_params": "zero__parameter_memory",
        "cpu_offload_param": "zero__parameter_memory",
    }
    for name, setting in aliases.items():
        key = f"{ZERO}.{name}"
        if found.take(key, False):
            found.set(key, **{setting: "pinned_host"})
        else:
            found.skip(key, "it is off")


def _convert_across_nodes(found: Conversion) -> None:
    """Converts ZeRO++ and MiCS to meshes of nodes, with or without a copy per node."""
    node = found.take(f"{ZERO}.zero_hpz_partition_size", 1)
    if node and node > 1:
        found.set(
            f"{ZERO}.zero_hpz_partition_size",
            mesh__replica=-1,
            mesh__data=node,
            zero__shard_over_replica=True,
            zero__secondary_partition=True,
        )
    else:
        found.skip(f"{ZERO}.zero_hpz_partition_size", "nodes hold no copy")
    kinds = {
        "zero_quantized_weights": "zero__quantized_weights",
        "zero_quantized_gradients": "zero__quantized_gradients",
    }
    for name, setting in kinds.items():
        key = f"{ZERO}.{name}"
        if not found.take(key, False):
            found.skip(key, "it is off")
            continue
        found.set(key, zero__shard_over_replica=True, **{setting: True})
        if not node or node <= 1:
            needs = "needs to know the nodes"
            found.require(key, needs, "set zero_hpz_partition_size to the GPUs of one")
    key = f"{ZERO}.zero_quantized_nontrainable_weights"
    found.refuse_if_on(key, "leave it out")
    for key in found.inside(f"{ZERO}.zeropp_loco_param"):
        found.refuse(key, "leave it out: int4 gradients have no error feedback here")
    found.skip(f"{ZERO}.zeropp_loco_param", "it is off")
    size = found.take(f"{ZERO}.mics_shard_size", -1)
    if size and size > 0:
        found.set(f"{ZERO}.mics_shard_size", mesh__data=size, mesh__replica=-1)
    else:
        found.skip(f"{ZERO}.mics_shard_size", "all devices share the shards")
    found.skip(f"{ZERO}.mics_hierarchical_params_gather", SCHEDULED)
