"""Sections of ZeRO, offload and ZeRO++."""

from typing import Any

from zjax.deepspeed import table
from zjax.deepspeed.table import If, Meanings, No, Section, Values, derived, refusal

ZERO = "zero_optimization"
STAGE_3 = "stage3_"
"""Prefix of names that DeepSpeed knows without it as well."""
MEMORIES = {"none": "", "cpu": "pinned_host", "nvme": "nvme"}
SCHEDULED = "XLA schedules and combines the messages"
EXPORTED = "zjax export gathers weights"
UNREAD = {
    "overlap_comm": No(SCHEDULED, False),
    "stage3_use_all_reduce_for_fetch_params": No(SCHEDULED, False),
    "stage3_allgather_sequential": No(SCHEDULED, False),
    "use_multi_rank_bucket_allreduce": No(SCHEDULED, False),
    "allgather_partitions": No(SCHEDULED, False),
    "reduce_scatter": No(SCHEDULED, False),
    "mics_hierarchical_params_gather": No(SCHEDULED, False),
    "allgather_bucket_size": No(SCHEDULED, 0),
    "reduce_bucket_size": No(SCHEDULED, 0),
    "stage3_prefetch_bucket_size": No(SCHEDULED, 0),
    "stage3_max_live_parameters": No(SCHEDULED, 0),
    "stage3_max_reuse_distance": No(SCHEDULED, 0),
    # DeepSpeed takes negative numbers, too.
    "stage3_module_granularity_threshold": No(SCHEDULED),
    "sub_group_size": No("updates run array by array", 0),
    "stage3_model_persistence_threshold": No("small arrays stay whole", 0),
    "contiguous_gradients": No("shardings replace flat buffers", False),
    "round_robin_gradients": No("shardings replace flat buffers", False),
    "load_from_fp32_weights": No("a checkpoint holds the masters", False),
    "elastic_checkpoint": No("a checkpoint opens on any mesh", False),
    "ignore_unused_parameters": No("unused parameters have zero gradients", False),
    "stage3_gather_16bit_weights_on_model_save": No(EXPORTED, False),
    "stage3_gather_fp16_weights_on_model_save": No(EXPORTED, False),
    "memory_efficient_linear": No("XLA compiles the layers", False),
    "pipeline_loading_checkpoint": No("arrays are read onto their shards", False),
    "override_module_apply": No("models are functions", False),
    "log_trace_cache_warnings": No("nothing is traced at run time", False),
    "enable_sanity_checks": No("shardings are checked before a run", False),
    "save_muon_momentum_buffer_in_memory": No("all state is in one memory", False),
    "grad_hooks": No("gradients are values", False),
    "cpu_offload_use_pin_memory": No("host memory is pinned", False),
}
LEAST_SHARDED = f"{STAGE_3}param_persistence_threshold"
AIO = ("block_size", "queue_depth", "intra_op_parallelism", "thread_count")
AIO += ("single_submit", "overlap_events", "use_gds")
DISKS = No("requests follow from the disks; see zjax bench --nvme")
LEAVE = refusal("leave it out")
ZENFLOW = refusal("leave it out; zero.offload.delay_updates_from overlaps updates, too")
LOCO = refusal("leave it out: int4 gradients have no error feedback here")


def _both(keys: dict[str, Any]) -> dict[str, Any]:
    """Adds keys without the prefix of stage 3."""
    return keys | {key.removeprefix(STAGE_3): value for key, value in keys.items()}


def _zero(values: Values) -> Meanings | str:
    """Meanings of the stage and of older names."""
    stage = derived("a true section is stage 1", {"zero.stage": 1})
    is_section = values[""] in (None, False)
    shards = is_section and (values["stage"] == 3 or values.is_auto("stage"))
    meanings: Meanings = {
        "": "the section is empty" if is_section else stage,
        "stage": {"zero.stage": values["stage"]} if is_section else None,
    }
    for key in _both({LEAST_SHARDED: 0}):
        least = {"zero.min_shard_elements": values[key]}
        if values.given(key):
            meanings[key] = least if shards else "the stage is below 3"
    return meanings | _across_nodes(values)


def _across_nodes(values: Values) -> Meanings:
    """Meanings of ZeRO++ and MiCS: meshes of nodes, with or without a copy per node."""
    node, size = values["zero_hpz_partition_size"], values["mics_shard_size"]
    copied = {"zero.replicas.secondary_partition": True}
    copied |= {"mesh.replica": -1, "mesh.data": node}
    shards = {"mesh.data": size, "mesh.replica": -1}
    meanings: Meanings = {
        "zero_hpz_partition_size": copied if node > 1 else "nodes hold no copy",
        "mics_shard_size": shards if size > 0 else "all devices share the shards",
    }
    for name in ("quantized_weights", "quantized_gradients"):
        key = f"zero_{name}"
        settings = {f"zero.replicas.{name}": True}
        meanings[key] = settings if values[key] else "it is off"
        if values[key] and node <= 1:
            remedy = "set zero_hpz_partition_size to the GPUs of one"
            values.found.need(f"{ZERO}.{key}", "needs to know the nodes", remedy)
    return meanings


OFFLOAD = {
    "": None,
    "device": "none",
    "nvme_path": "",
    "pin_memory": No("host memory is pinned", True),
    "buffer_count": No("buffers follow from the arrays", 5),
}
OPTIMIZER = OFFLOAD | {
    "ratio": 1.0,
    "super_offload": If(LEAVE),
    "fast_init": No("arrays are made where they stay", False),
    "pipeline_read": No("reads overlap the update", False),
    "pipeline_write": No("writes overlap the update", False),
    "cpuadam_cores_perc": No("updates run on the device", 0.8),
}
PARAM = OFFLOAD | {
    "buffer_size": No("buffers follow from the arrays", 100_000_000),
    "max_in_cpu": No("arrays that fit stay in memory", 1_000_000_000),
}


def _offload(name: str, setting: str, keys: dict[str, Any]) -> Section:
    """Section of the offload of optimizer state or of parameters."""
    path = f"{ZERO}.{name}"

    def read(values: Values) -> Meanings | str:
        device, disk = values["device"], values["nvme_path"]
        memory, state = MEMORIES.get(device), values.found[STATE_DEVICE]
        is_apart = setting != "zero.offload" and state == "none"
        note = "optimizer state is stored on the host, too" * is_apart
        dropped = "DeepSpeed drops 'auto' there: " * values.is_auto("")
        nothing = "nothing is offloaded"
        meanings: Meanings = {
            "": table.Outcome("not needed", f"{dropped}{nothing}"),
            "device": derived(note, {setting: memory}) if memory else nothing,
            "nvme_path": "nothing is stored on a disk",
        }
        if device not in MEMORIES:
            meanings["device"] = refusal(f"use one of {', '.join(MEMORIES)}")
        if disk and device == "nvme":
            meanings["nvme_path"] = {"zero.offload.nvme_paths": (disk,)}
        if "ratio" in keys:
            meanings["ratio"] = "all of it"
            if not 0 <= values["ratio"] <= 1:
                meanings["ratio"] = refusal("use 0 to 1", "is out of range")
            elif values["ratio"] != 1 and device == "cpu":
                note = "as much stays on the devices as is free there"
                meanings["ratio"] = derived(note, {"zero.offload": "auto"})
                meanings["device"] = derived("see ratio")
            elif values["ratio"] != 1:
                meanings["ratio"] = refusal("use 1.0, or the device cpu")
        return meanings

    return Section(path, keys, read, is_strict=True, instead=[None, table.AUTO])


def _memories(values: Values) -> Meanings | str:
    """Replaces memories of the run by DeepSpeed's defaults, which keys change later."""
    found, old = values.found, ("cpu_offload_param", "cpu_offload_params")
    offloads_params = found[PARAM_DEVICE] != "none" or any(values[x] for x in old)
    if not found.is_auto(STATE_DEVICE):
        found.settings["zero.offload"] = "pinned_host" if offloads_params else None
    # Without offload of the state, this setting would turn it on.
    offloads_state = found[STATE_DEVICE] != "none" or values["cpu_offload"]
    if offloads_state and not found.is_auto(PARAM_DEVICE):
        found.settings["zero.offload.parameter_memory"] = "device"
    return {}


STATE_DEVICE = f"{ZERO}.offload_optimizer.device"
PARAM_DEVICE = f"{ZERO}.offload_param.device"
SECTIONS = (
    Section(ZERO, read=_memories, instead=[True, False]),
    _offload("offload_optimizer", "zero.offload", OPTIMIZER),
    _offload("offload_param", "zero.offload.parameter_memory", PARAM),
    Section(
        ZERO,
        {
            **_both(UNREAD),
            **_both({LEAST_SHARDED: 100_000}),
            "": None,
            "stage": 0,
            "cpu_offload": If({"zero.offload": "pinned_host"}),
            "cpu_offload_params": If({"zero.offload.parameter_memory": "pinned_host"}),
            "cpu_offload_param": If({"zero.offload.parameter_memory": "pinned_host"}),
            "zero_hpz_partition_size": 1,
            "zero_quantized_weights": False,
            "zero_quantized_gradients": False,
            "zero_quantized_nontrainable_weights": If(LEAVE),
            "mics_shard_size": -1,
            "legacy_stage1": If(LEAVE),
        },
        _zero,
        is_strict=True,
        instead=[True, False],
    ),
    Section(f"{ZERO}.zenflow", rest=ZENFLOW),
    Section(f"{ZERO}.leaf_module", rest="experts are one array"),
    Section(
        f"{ZERO}.zeropp_loco_param",
        {"": No("it is off")},
        rest=LOCO,
        instead=[None],
    ),
    Section("aio", dict.fromkeys(AIO, DISKS)),
)
