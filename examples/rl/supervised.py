"""Supervised start: a small decoder learns solved traces of a task, as bytes.

Run: zjax train --config=examples/rl/supervised.py
"""

from typing import Any

from zjax import config as zconfig


def get_config():
    config: Any = zconfig.base()
    config.directory = "runs/rl/sums/supervised"
    config.num_steps = 1_200
    config.global_batch_size = 32  # rows of 64 bytes, each with two or three traces
    config.data.source = "tokens"
    config.data.path = "runs/rl/sums/data/traces"
    config.data.packing = "documents"

    config.model.num_layers = 2
    config.model.embed_size = 64
    config.model.num_heads = 4
    config.model.max_length = 64
    config.model.vocab_size = 257
    config.precision.compute_dtype = "float32"

    config.optimizer.peak_learning_rate = 2e-3
    config.optimizer.schedule.num_warmup_steps = 50
    config.evaluation.every_steps = 400
    config.checkpoint.every_steps = 0
    return config
