"""Batch sizes, clipping, and how often a run reports."""

import math

from zjax.config.deepspeed.conversion import Conversion

GLOBAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
SUMS = "gradient_accumulation_steps"
OLD_CLIPPING = "its default since June 2026; older releases did not clip"


def convert_steps(found: Conversion) -> None:
    """Reads the top-level numbers of a run."""
    _convert_batch(found)
    clip = found.take("gradient_clipping", 1.0)
    if clip is not None:
        since = "" if found.given("gradient_clipping") else OLD_CLIPPING
        norm = clip or math.inf
        found.set("gradient_clipping", since, default=clip, optimizer__clip_norm=norm)
    every = found.take("steps_per_print", 0)
    if every:
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
    fields = {
        GLOBAL: "global_batch_size",
        MICRO: "microbatch_size",
        SUMS: "num_microbatches",
    }
    sizes = {key: found.take(key, 0) for key in fields}
    for key, size in sizes.items():
        if size:
            found.set(key, **{fields[key]: size})
    if None in sizes.values():
        return
    if not sizes[GLOBAL] and not sizes[MICRO]:
        found.require(GLOBAL, "is not given", f"give it, or {MICRO}")
    elif not sizes[GLOBAL]:
        found.settings["global_batch_size"] = 0
    if not sizes[SUMS] and not (sizes[GLOBAL] and sizes[MICRO]):
        found.set(SUMS, default=1, num_microbatches=1)
