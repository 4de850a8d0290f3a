"""Sections of ZeRO, offload and ZeRO++."""

from typing import Any

from zjax.deepspeed import table
from zjax.deepspeed.table import If, Meanings, Section, Values, derived, refusal

ZERO = "zero_optimization"
STAGE_3 = "stage3_"
"""Prefix of names that DeepSpeed knows without it as well."""
MEMORIES = {"none": "", "cpu": "pinned_host", "nvme": "nvme"}
SCHEDULED = "XLA schedules and combines the messages"
SWITCHES = {
    "overlap_comm": SCHEDULED,
    "stage3_use_all_reduce_for_fetch_params": SCHEDULED,
    "stage3_allgather_sequential": SCHEDULED,
    "use_multi_rank_bucket_allreduce": SCHEDULED,
    "allgather_partitions": SCHEDULED,
    "reduce_scatter": SCHEDULED,
    "mics_hierarchical_params_gather": SCHEDULED,
    "contiguous_gradients": "shardings replace flat buffers",
    "round_robin_gradients": "shardings replace flat buffers",
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
    "save_muon_momentum_buffer_in_memory": "zero.offload places all state",
    "grad_hooks": "gradients are values",
    "cpu_offload_use_pin_memory": "host memory is pinned",
}
COUNTS = {
    "allgather_bucket_size": SCHEDULED,
    "reduce_bucket_size": SCHEDULED,
    "stage3_prefetch_bucket_size": SCHEDULED,
    "stage3_max_live_parameters": SCHEDULED,
    "stage3_max_reuse_distance": SCHEDULED,
    "stage3_module_granularity_threshold": SCHEDULED,
    "sub_group_size": "updates run array by array",
    "stage3_model_persistence_threshold": "small arrays stay whole, however many",
}
"""Reasons why switches and whole numbers are not needed."""
ON_HOST = {
    "cpu_offload": {"zero.offload": "pinned_host"},
    "cpu_offload_params": {"zero.offload.parameter_memory": "pinned_host"},
    "cpu_offload_param": {"zero.offload.parameter_memory": "pinned_host"},
}
LEAST_SHARDED = f"{STAGE_3}param_persistence_threshold"
AIO = ("block_size", "queue_depth", "intra_op_parallelism", "thread_count")
AIO += ("single_submit", "overlap_events", "use_gds")
DISKS = "requests follow from the disks; see zjax bench --nvme"
LEAVE = refusal("leave it out")
ZENFLOW = refusal("leave it out; zero.offload.delay_updates_from overlaps updates, too")
LOCO = refusal("leave it out: int4 gradients have no error feedback here")


def _both(keys: dict[str, Any]) -> dict[str, Any]:
    """Adds keys without the prefix of stage 3."""
    return keys | {key.removeprefix(STAGE_3): value for key, value in keys.items()}


def _zero(values: Values) -> Meanings | str:
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
    for key in _both(COUNTS):
        # DeepSpeed takes any granularity.
        if values[key] < 0 and "granularity" not in key:
            meanings[key] = _OUTSIDE
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


_OUTSIDE = refusal("use 0 or more", "is out of range")
_OFFLOAD = {"device": "none", "nvme_path": "", "buffer_count": 5, "pin_memory": True}
_OPTIMIZER = _OFFLOAD | dict.fromkeys(("pipeline_read", "pipeline_write"), False)
_OPTIMIZER |= {"fast_init": False, "super_offload": If(LEAVE)}
_OPTIMIZER |= {"ratio": 1.0, "cpuadam_cores_perc": 0.8}
_PARAM = _OFFLOAD | {"buffer_size": 100_000_000, "max_in_cpu": 1_000_000_000}
_OFFLOAD_UNREAD = {
    "pin_memory": "host memory is pinned",
    "buffer_count": "buffers follow from the arrays",
    "buffer_size": "buffers follow from the arrays",
    "max_in_cpu": "arrays that fit stay in memory",
    "fast_init": "arrays are made where they stay",
    "pipeline_read": "reads overlap the update",
    "pipeline_write": "writes overlap the update",
    "cpuadam_cores_perc": "updates run on the device",
}


def _offload(name: str, setting: str, keys: dict[str, Any]) -> Section:
    """Section of the offload of optimizer state or of parameters."""
    path = f"{ZERO}.{name}"

    def read(values: Values) -> Meanings | str:
        device, disk = values["device"], values["nvme_path"]
        memory, before = MEMORIES.get(device), values.found.settings
        is_apart = "zero.offload" not in (*before, setting)
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
            if values["ratio"] != 1 and device == "cpu":
                note = "as much stays on the devices as is free there"
                meanings["ratio"] = derived(note, {"zero.offload": "auto"})
                meanings["device"] = derived("see ratio")
            elif values["ratio"] != 1:
                meanings["ratio"] = refusal("use 1.0, or the device cpu")
        for key in keys:
            value = values[key]
            if type(value) is int and value < 0:
                meanings[key] = _OUTSIDE
            if type(value) is float and not 0 <= value <= 1:
                meanings[key] = refusal("use 0 to 1", "is out of range")
        return meanings

    return Section(
        path,
        {"": None, **keys},
        read,
        unread={key: why for key, why in _OFFLOAD_UNREAD.items() if key in keys},
        is_strict=True,
        instead=[None, table.AUTO],
    )


SECTIONS = (
    _offload("offload_optimizer", "zero.offload", _OPTIMIZER),
    _offload("offload_param", "zero.offload.parameter_memory", _PARAM),
    Section(
        ZERO,
        _both(dict.fromkeys(SWITCHES, False) | dict.fromkeys(COUNTS, 0))
        | _both({LEAST_SHARDED: 100_000})
        | {key: If(settings) for key, settings in ON_HOST.items()}
        | dict.fromkeys(("zero_quantized_weights", "zero_quantized_gradients"), False)
        | {"": None, "stage": 0, "zero_hpz_partition_size": 1, "mics_shard_size": -1}
        | dict.fromkeys(
            ("legacy_stage1", "zero_quantized_nontrainable_weights"), If(LEAVE)
        ),
        _zero,
        unread=_both(SWITCHES | COUNTS),
        is_strict=True,
        instead=[True, False],
    ),
    Section(f"{ZERO}.zenflow", rest=ZENFLOW),
    Section(f"{ZERO}.leaf_module", rest="experts are one array"),
    Section(
        f"{ZERO}.zeropp_loco_param",
        unread={"": "it is off"},
        rest=LOCO,
        instead=[None],
    ),
    Section("aio", unread=dict.fromkeys(AIO, DISKS)),
)
