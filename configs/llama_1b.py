"""The shape of Llama 3.2 1B, under ZeRO-3.

Run:     zjax train --config=configs/llama_1b.py
Needs:   tokens in data/llama, made by `zjax data prepare`;
         GPUs of 80 GiB whose number divides 128.
Expect:  on 64 GPUs about 0.35 GB of state on each, plus activations.
         `zjax plan --config=configs/llama_1b.py --num_devices=64` lists all.
"""

from zjax import config as zconfig


def get_config():
    config = zconfig.base()
    config.directory = "runs/llama_1b"
    config.num_steps = 20_000
    config.global_batch_size = 256
    config.microbatch_size = 2

    config.zero.stage = 3

    config.model.num_layers = 16
    config.model.embed_size = 2_048
    config.model.mlp_size = 8_192
    config.model.num_heads = 32
    config.model.num_kv_heads = 8
    config.model.vocab_size = 128_256
    config.model.max_length = 4_096
    config.model.norm = "rms_norm"
    config.model.norm_eps = 1e-5
    config.model.positions = "rotary"
    config.model.positions.theta = 500_000.0
    config.model.activation = "swiglu"
    config.model.use_bias = False
    config.model.tied_head = True
    config.data.source = "tokens"
    config.data.path = "data/llama"

    config.optimizer.peak_learning_rate = 3e-4
    config.optimizer.schedule.num_warmup_steps = 1_000
    return config
