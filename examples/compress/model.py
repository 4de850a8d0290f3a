"""A small Llama that reads the source of Python's standard library, as bytes.

Run: zjax train --config=examples/compress/model.py
"""

from typing import Any

from zjax import config as zconfig


def get_config():
    config: Any = zconfig.base()
    config.directory = "runs/compress/large"
    config.num_steps = 600
    config.global_batch_size = 8

    # The shape is one that compressed-tensors and GGUF describe, and groups of 128
    # inputs divide its matrices.
    config.model.num_layers = 4
    config.model.embed_size = 128
    config.model.mlp_size = 384
    config.model.num_heads = 4
    config.model.vocab_size = 257
    config.model.max_length = 128
    config.model.norm = "rms_norm"
    config.model.positions = "rotary"
    config.model.activation = "swiglu"
    config.model.use_bias = False
    config.model.remat = "none"
    config.precision.compute_dtype = "float32"

    config.optimizer.peak_learning_rate = 2e-3
    config.optimizer.schedule.num_warmup_steps = 30
    config.evaluation.every_steps = 0
    config.evaluation.num_batches = 32
    config.checkpoint.every_steps = 0
    return config
