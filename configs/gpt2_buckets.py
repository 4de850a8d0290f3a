"""GPT-2 124M whose batches have one length each (arXiv:2405.13226).

Documents are cut into pieces of 256 to 8,192 tokens, the short ones first in each
cycle, so that no attention crosses documents.

Run:     zjax train --config=configs/gpt2_buckets.py
Needs:   one data-centre GPU, or several whose number divides 16.
Expect:  6 programs, and a step time that follows the length of its rows.
"""

from zjax import config as zconfig


def get_config():
    config = zconfig.base()
    config.directory = "runs/gpt2_buckets"
    config.num_steps = 2_000
    config.global_batch_size = 16

    config.zero.stage = 1

    config.model.num_layers = 12
    config.model.embed_size = 768
    config.model.num_heads = 12
    config.model.positions = "rotary"
    config.model.max_length = 8_192

    config.optimizer.peak_learning_rate = 6e-4
    config.optimizer.schedule.num_warmup_steps = 200

    config.buckets = "cut"
    config.buckets.shortest = 256
    config.buckets.order = "grow"
    return config
