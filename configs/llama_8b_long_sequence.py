"""The shape of Llama 3 8B on sequences of 128k tokens, each split over four GPUs.

Run:     zjax train --config=configs/llama_8b_long_sequence.py
Needs:   tokens in data/llama, made by `zjax data prepare`; GPUs of 80 GiB whose number
         is a multiple of 4 and divides 128.
Expect:  on 8 GPUs 18.1 GB of state on each, and 32,768 tokens of each sequence, for
         which block inputs take 8.6 GB. `zjax plan --num_devices=8
         --config=configs/llama_8b_long_sequence.py` lists all.
"""

from zjax import config as zconfig


def get_config():
    config = zconfig.base()
    config.directory = "runs/llama_8b_long_sequence"
    config.num_steps = 10_000
    config.global_batch_size = 32
    config.microbatch_size = 1

    config.mesh.sequence = 4
    config.zero.stage = 3

    config.model.num_layers = 32
    config.model.embed_size = 4_096
    config.model.mlp_size = 14_336
    config.model.num_heads = 32
    config.model.num_kv_heads = 8
    config.model.vocab_size = 128_256
    config.model.max_length = 131_072
    config.model.norm = "rms_norm"
    config.model.norm_eps = 1e-5
    config.model.positions = "rotary"
    config.model.positions.theta = 500_000.0
    config.model.activation = "swiglu"
    config.model.use_bias = False
    config.model.tied_head = False
    config.model.remat = "full"
    config.data.source = "tokens"
    config.data.path = "data/llama"

    config.optimizer.peak_learning_rate = 1e-5
    config.optimizer.schedule.num_warmup_steps = 100
    return config
