"""Sections of batch sizes, clipping, the mesh and recomputation."""

import math

from zjax.deepspeed.table import If, Meanings, No, Section, To, Values, derived, refusal

GLOBAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
SUMS = "gradient_accumulation_steps"
SIZES = {
    GLOBAL: "global_batch_size",
    MICRO: "microbatch_size",
    SUMS: "num_microbatches",
}
MISSING = refusal("give it", "is not given")
DENSE = refusal("leave it out: gradients are dense")


def _batch(values: Values) -> Meanings | str:
    """Meanings of batch sizes, of which zjax derives the third from two.

    As in DeepSpeed, a step has one microbatch if no key says otherwise.
    """
    found = values.found
    if found["elasticity.enabled"]:
        remedy = "leave it out, or set elasticity.ignore_non_elastic_batch_info"
        refused = refusal(remedy, "is given by elasticity")
        ignores = found["elasticity.ignore_non_elastic_batch_info"]
        meaning = "elasticity gives it" if ignores else refused
        return {key: meaning if values.given(key) else None for key in SIZES}
    meanings: Meanings = {} if values.given(SUMS) else {SUMS: None}
    if any(values.is_auto(key) or found.is_faulty(key) for key in SIZES):
        return meanings
    if not values[GLOBAL] and not values[MICRO]:
        meanings[GLOBAL] = refusal(f"give it, or {MICRO}", "is not given")
    elif not found.holds(GLOBAL):
        # 0 derives the size from the device batch, in place of zjax's default.
        meanings[GLOBAL] = {SIZES[GLOBAL]: 0}
    if not (values[GLOBAL] and values[MICRO]) and values[SUMS] >= 1:
        meanings[SUMS] = {SIZES[SUMS]: values[SUMS]}
    return meanings


def _steps(values: Values) -> Meanings | str:
    """Meanings of clipping, reports and sums of gradients."""
    every, why = values["steps_per_print"], "metrics are written as the run says"
    # 0 turns clipping off in DeepSpeed.
    norm = {"optimizer.clip_norm": values["gradient_clipping"] or math.inf}
    since = "its default since June 2026; older releases did not clip"
    is_new = not values.given("gradient_clipping")
    is_mean = values["gradient_allreduce_op"] == "mean"
    other = refusal("use 'mean', and scale the learning rate")
    meanings: Meanings = {
        "gradient_clipping": derived(since, norm) if is_new else norm,
        "gradient_allreduce_op": "gradients are means" if is_mean else other,
        "steps_per_print": "it never prints; metrics are as the run says",
    }
    if every != math.inf:
        reports = {"observe.log_every_steps": int(every)}
        meanings["steps_per_print"] = reports if every else why
        if not every.is_integer():
            whole = refusal("write a whole number", "is not a whole number")
            meanings["steps_per_print"] = whole
    return meanings


def _elastic(values: Values) -> Meanings | str:
    """Meanings of elastic batch sizes, which follow from the number of devices."""
    sizes, version = values["micro_batch_sizes"], values["version"]
    # Version 0.1 has no nodes: 0 selects its rule in zjax.
    nodes = values["num_gpus_per_node"] or 1 if version == 0.2 else 0
    shards = {"elasticity.shards_per_node": nodes}
    are_sizes = sizes and all(isinstance(n, int) and n > 0 for n in sizes)
    chosen = {"elasticity.microbatch_sizes": tuple(sizes)}
    listed = refusal("write whole numbers above 0, as [2, 4]", "is not a list")
    meanings: Meanings = {
        "micro_batch_sizes": chosen if are_sizes else listed,
        "version": shards if version in (0.1, 0.2) else refusal("use 0.1 or 0.2"),
        "num_gpus_per_node": shards,
    }
    for name in ("max_train_batch_size", "micro_batch_sizes"):
        if not values.given(name):
            meanings[name] = MISSING
    if values["model_parallel_size"] != 1:
        remedy = f"use 1, or give {GLOBAL} in place of elasticity"
        meanings["model_parallel_size"] = refusal(remedy)
    return meanings


def _stages(values: Values) -> Meanings | str:
    """Meaning of the number of stages."""
    stages = values["stages"]
    number = stages if isinstance(stages, int) else 0
    if number < 1 and stages is not None:
        return {"stages": refusal("use 1 or more, or auto", "is no number")}
    return {"stages": {"mesh.pipeline": number} if number > 1 else EQUAL}


EQUAL, EXPERTS = "stages have equally many layers", "model.moe describes the experts"
TENSOR = To(0, "mesh.tensor", least=2, why="one device holds each matrix")
OURS = derived("the devices give all batch sizes", dict.fromkeys(SIZES.values(), 0))
ON_HOST = {"model.activation_memory": "pinned_host", "model.remat": "full"}
SECTIONS = (
    Section(
        "",
        {key: To(int(key == SUMS), name, least=1) for key, name in SIZES.items()},
        _batch,
    ),
    Section(
        "",
        {
            "gradient_clipping": 1.0,
            "steps_per_print": 0.0,
            "gradient_allreduce_op": "mean",
            "sparse_gradients": If(DENSE, "gradients are dense"),
            "sequence_parallel_size": To(0, "mesh.sequence", least=1),
            "data_parallel_size": To(0, "mesh.data", least=1),
            "use_data_before_expert_parallelism": No("the mesh has one order of axes"),
        },
        _steps,
    ),
    Section(
        "elasticity",
        {
            "enabled": If(OURS),
            "ignore_non_elastic_batch_info": No("no other size is used", False),
            "min_time": No("DeepSpeed does not use it"),
            "max_train_batch_size": To(2_000, "elasticity.max_batch_size"),
            "micro_batch_sizes": [2, 4, 6],
            "min_gpus": To(1, "elasticity.min_shards"),
            "max_gpus": To(10_000, "elasticity.max_shards"),
            "prefer_larger_batch": To(True, "elasticity.prefer_larger"),
            "version": 0.2,
            "num_gpus_per_node": 1,
            "model_parallel_size": If("a batch shard is one device", default=1),
        },
        _elastic,
    ),
    Section(
        "tensor_parallel",
        {
            **dict.fromkeys(("autotp_size", "tp.tp_size"), TENSOR),
            "tensor_parallel.tp_size": TENSOR,
            **dict.fromkeys(("tp_overlap_comm", "keep_module_on_host"), False),
            **dict.fromkeys(("replace_with_kernel_inject", "kernel_inject"), False),
            **dict.fromkeys(("dtype", "tensor_parallel", "tp", "preset_model")),
            **dict.fromkeys(("injection_policy_tuple", "partition_config")),
        },
        rest="names of dims place the matrices; see mesh.rules",
        is_strict=True,
    ),
    Section(
        "pipeline",
        {
            "stages": None,
            "activation_checkpoint_interval": If(
                {"model.remat": "full"}, "model.remat says what is recomputed", 0
            ),
        },
        _stages,
        rest=EQUAL,
    ),
    Section(
        "expert_parallel",
        {"enabled": If(derived(EXPERTS)), "autoep_size": To(1, "mesh.expert")},
        off=EXPERTS,
        rest=EXPERTS,
    ),
    Section(
        "activation_checkpointing",
        {
            "cpu_checkpointing": If(ON_HOST, "inputs of layers stay on the devices"),
            "partition_activations": If(
                derived("activations are sharded as the mesh shards them"), None
            ),
        },
        rest="model.remat says what is recomputed",
    ),
)
