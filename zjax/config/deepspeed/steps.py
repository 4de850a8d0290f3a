"""Batch sizes, clipping, and how often a run reports."""

import math

from zjax.config.deepspeed.conversion import Conversion

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
    """Reads the top-level numbers of a run."""
    if found.take(f"{ELASTIC}.enabled", False):
        _convert_elastic(found)
    else:
        _convert_batch(found)
        found.skip_rest(ELASTIC, "its section is off")
    clip = found.take("gradient_clipping", 1.0)
    if clip is not None:
        since = "" if found.given("gradient_clipping") else OLD_CLIPPING
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
    """Two of the three sizes give the third, once the devices are known.

    Steps have one microbatch where neither says otherwise, as in DeepSpeed.
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
        found.settings["global_batch_size"] = 0
    if not sizes[SUMS] and not (sizes[GLOBAL] and sizes[MICRO]):
        found.set(SUMS, default=1, num_microbatches=1)


def _convert_elastic(found: Conversion) -> None:
    """Sizes that follow from the number of devices, as in DeepSpeed."""
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
