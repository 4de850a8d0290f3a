"""Adapters beside the decoder of the quickstart, on other text.

Run: zjax train --config=examples/fine_tune/config.py --simulated_devices=8
"""

from typing import Any

from zjax import config as zconfig


def get_config():
    config: Any = zconfig.base()
    config.directory = "runs/fine_tune"
    config.num_steps = 100
    config.checkpoint.init_from = "runs/quickstart"
    config.data.source = "tokens"
    config.data.path = "data/docs"

    config.lora.rank = 8
    config.lora.alpha = 16.0
    config.optimizer.peak_learning_rate = 5e-3
    config.optimizer.schedule.num_warmup_steps = 10
    config.optimizer.weight_decay = 0.0
    config.precision.compute_dtype = "float32"

    config.model.num_layers = 4
    config.model.embed_size = 128
    config.model.num_heads = 4
    config.model.max_length = 128
    config.model.vocab_size = 257
    return config
