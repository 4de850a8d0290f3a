"""GPT-2 with 1.5 billion parameters: ZeRO-2, gradients summed over microbatches.

Run:     zjax train --config=configs/gpt2_1p5b.py
Needs:   tokens in data/gpt2, made by `zjax data prepare`;
         GPUs of 80 GiB whose number divides 64.
Expect:  on 64 GPUs about 3.5 GB of state on each, plus activations.
         `zjax plan --config=configs/gpt2_1p5b.py --num_devices=64` lists all.
"""

from zjax import config as zconfig


def get_config():
    config = zconfig.base()
    config.directory = "runs/gpt2_1p5b"
    config.num_steps = 20_000
    config.global_batch_size = 512
    config.microbatch_size = 8

    config.zero.stage = 2

    config.model.num_layers = 48
    config.model.embed_size = 1_600
    config.model.num_heads = 25
    config.model.vocab_size = 50_257
    config.model.max_length = 1_024
    config.data.source = "tokens"
    config.data.path = "data/gpt2"

    config.optimizer.peak_learning_rate = 2e-4
    config.optimizer.schedule.num_warmup_steps = 1_000
    return config
