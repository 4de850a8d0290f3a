"""Names of DeepSpeed's keys, to find the nearest one for an unknown key."""

from typing import Any

from zjax.deepspeed import efficiency, optimizer, schedulers, steps, strict, zero
from zjax.deepspeed.conversion import AUTO

THEIRS = (
    *(steps.GLOBAL, steps.MICRO, steps.SUMS, "gradient_clipping", "steps_per_print"),
    *("scheduler", "fp16", "bf16", zero.ZERO),
)
"""Keys of DeepSpeed that are not settings of zjax."""
_OBJECTS = [
    *strict.STRICT,
    *("curriculum_learning.schedule_config", "data_efficiency.data_routing"),
    *(f"{efficiency.LTD}{x}" for x in ("", ".random_ltd_schedule")),
    *("data_efficiency.data_sampling", "timers", "checkpoint", *steps.UNSUPPORTED),
    *("optimizer", "scheduler", "scheduler.params", "fp16", "bfloat16", *steps.SINKS),
    *("activation_checkpointing", "tensor_parallel", "pipeline", "aio", "elasticity"),
    *("data_efficiency", "curriculum_learning", "sparse_attention", "data_types"),
    *("progressive_layer_drop", "expert_parallel", "torch_autocast", "autotuning"),
]
SECTIONS: dict[str, tuple[Any, ...]] = dict.fromkeys(_OBJECTS, ()) | {
    "bf16": (None,),
    "optimizer.params": (None,),
    zero.ZERO: (True, False),
    f"{zero.ZERO}.offload_optimizer": (None, AUTO),
    f"{zero.ZERO}.offload_param": (None, AUTO),
}
"""Values that DeepSpeed takes in place of an object, by section."""
KNOWN: dict[str, tuple[str, ...]] = {
    "": (
        *THEIRS,
        *("optimizer", "activation_checkpointing", "tensor_parallel", "pipeline"),
        *("aio", "data_efficiency", "curriculum_learning", "sparse_attention"),
        *("progressive_layer_drop", "expert_parallel", "torch_autocast", "bfloat16"),
        *("data_types", "communication_data_type", "sequence_parallel_size"),
        *("data_parallel_size", "tensorboard", "wandb", "csv_monitor", "elasticity"),
        *("sparse_gradients", "gradient_allreduce_op", "prescale_gradients"),
        *("gradient_predivide_factor", *steps.NO_EFFECT, *steps.SECTIONS),
        *steps.UNSUPPORTED,
    ),
    "optimizer": ("type", "params"),
    "optimizer.params": (
        *("lr", "betas", "eps", "weight_decay", *optimizer.NO_EFFECT),
    ),
    "scheduler": ("type", "params"),
    "scheduler.params": (
        *("warmup_num_steps", "warmup_min_lr", "warmup_max_lr", "total_num_steps"),
        *schedulers.CYCLE_KEYS,
    ),
    zero.ZERO: ("stage", "offload_optimizer", "offload_param", *zero.NO_EFFECT),
    f"{zero.ZERO}.offload_optimizer": (
        *("device", "nvme_path", *zero.OFFLOAD_NO_EFFECT),
    ),
    "elasticity": steps.ELASTIC_KEYS,
    **{section: tuple(keys) for section, keys in strict.STRICT.items()},
}
"""Names of keys by section; the section '' is the outermost object."""
