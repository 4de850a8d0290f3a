"""What is trained, and the methods that are compared: settings of zjax by name."""

import math
from typing import Any

BASE: dict[str, Any] = {
    "num_steps": 300,
    "global_batch_size": 8,
    "precision.compute_dtype": "float32",
    "zero.stage": 0,
    "model": {
        "num_layers": 4,
        "embed_size": 128,
        "num_heads": 4,
        "max_length": 64,
        "remat": "none",
        "loss_chunk_tokens": 0,
    },
    "optimizer": {
        "schedule": {"kind": "constant", "num_warmup_steps": 20},
        "peak_learning_rate": 0.001,
        "clip_norm": math.inf,
    },
    "evaluation": {"every_steps": 10, "num_batches": 4},
}
COPIES = {"mesh.replica": -1, "mesh.data": 1}
"""A copy of the model in each process."""
LONGER = {"num_steps": 480}
"""More steps, for a loss that Adam reaches in fewer."""
WARM_UP = {"communication.codec": "bfloat16"}
"""Of gradients that are not compressed."""
METHODS: dict[str, dict[str, Any]] = {
    "adam_float32": {},
    "adam_bfloat16": {**COPIES, "communication.codec": "bfloat16"},
    "onebit_adam": {
        **COPIES,
        **LONGER,
        **WARM_UP,
        "optimizer.rule": "onebit_adam",
        "optimizer.rule.freeze_step": 30,
    },
    "zero_one_adam": {
        **COPIES,
        **LONGER,
        **WARM_UP,
        "optimizer.rule": "zero_one_adam",
        "optimizer.rule.freeze_step": 45,
        "optimizer.rule.var_update_scaler": 8,
        "optimizer.rule.local_step_scaler": 16,
    },
    "diloco": {
        **COPIES,
        **LONGER,
        "communication.codec": "int4",
        "communication.local_steps.num_steps": 10,
        "communication.local_steps.outer_learning_rate": 1.0,
        "communication.local_steps.outer_momentum": 0.0,
    },
    "zero3": {"zero.stage": 3},
    "zeropp": {
        "zero.stage": 3,
        "mesh.replica": 2,
        "zero.replicas.secondary_partition": True,
        "zero.replicas.quantized_weights": True,
        "zero.replicas.quantized_gradients": True,
    },
}
PEERS = {
    "torch_float32": ("--hook=none",),
    "torch_bfloat16": ("--hook=bfloat16",),
    "torch_powersgd": ("--hook=powersgd",),
}
"""Torch's DistributedDataParallel: arguments of `slow_network_peer.py`."""
ALONE = "alone"
"""Steps of `BASE` in processes that do not communicate, all at once."""


def settings_of(method: str, num_processes: int) -> list[dict[str, Any]]:
    """Settings of a method, or of `ALONE`, for `zjax.load_config`."""
    if method != ALONE:
        return [BASE, METHODS[method]]
    share = BASE["global_batch_size"] // num_processes
    return [BASE, {"global_batch_size": share, "processes.coordinator": "none"}]
