"""The shape of GPT-3 6.7B at twice its length, under ZeRO-3.

The vocabulary is GPT-2's 50257 entries, padded to a multiple of 128.

Run:     zjax train --config=configs/gpt_6p7b.py
Needs:   tokens in data/gpt2, made by `zjax data prepare`;
         8 or more GPUs of 80 GiB whose number divides 256.
Expect:  on 64 GPUs about 1.9 GB of state on each, plus activations.
         `zjax plan --config=configs/gpt_6p7b.py --num_devices=64` lists all.
"""

from zjax import config as zconfig


def get_config():
    config = zconfig.base()
    config.directory = "runs/gpt_6p7b"
    config.num_steps = 20_000
    config.global_batch_size = 512
    config.microbatch_size = 2

    config.zero.stage = 3

    config.model.num_layers = 32
    config.model.embed_size = 4_096
    config.model.num_heads = 32
    config.model.vocab_size = 50_304
    config.model.max_length = 4_096
    config.model.remat = "full"
    config.data.source = "tokens"
    config.data.path = "data/gpt2"

    config.optimizer.peak_learning_rate = 1.2e-4
    config.optimizer.schedule.num_warmup_steps = 1_000
    return config
