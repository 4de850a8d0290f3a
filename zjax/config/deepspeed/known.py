"""Names of keys, among which to look for the nearest of an unknown one."""

from typing import Any

from zjax.config.deepspeed import optimizer, others, schedulers, steps, zero
from zjax.config.deepspeed.conversion import AUTO

THEIRS = (
    *(steps.GLOBAL, steps.MICRO, steps.SUMS, "gradient_clipping", "steps_per_print"),
    *("scheduler", "fp16", "bf16", zero.ZERO),
)
"""Keys of DeepSpeed that are no settings of zjax."""
_OBJECTS = [
    *("optimizer", "scheduler", "scheduler.params", "fp16", "bfloat16", *others.SINKS),
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
"""Keys whose values are objects, and what DeepSpeed takes there beside them."""
KNOWN = [
    *THEIRS,
    *("optimizer", "type", "params", "lr", "betas", "eps", "weight_decay"),
    *("warmup_num_steps", "warmup_min_lr", "warmup_max_lr", "total_num_steps"),
    *("enabled", "loss_scale", "initial_scale_power", "hysteresis"),
    *("stage", "offload_optimizer", "offload_param", "device"),
    *("nvme_path", "activation_checkpointing", "tensor_parallel", "pipeline", "aio"),
    *("data_efficiency", "curriculum_learning", "sparse_attention", "bfloat16"),
    *("progressive_layer_drop", "expert_parallel", "torch_autocast", "data_types"),
    *("communication_data_type", "sequence_parallel_size", "data_parallel_size"),
    *("tensorboard", "wandb", "csv_monitor", "sparse_gradients", "elasticity"),
    *("gradient_allreduce_op", "prescale_gradients", "gradient_predivide_factor"),
    *steps.ELASTIC_KEYS,
    *schedulers.CYCLE_KEYS,
    *optimizer.NO_EFFECT,
    *zero.NO_EFFECT,
    *zero.OFFLOAD_NO_EFFECT,
    *others.NO_EFFECT,
    *others.SECTIONS,
    *others.UNSUPPORTED,
]
