"""The shape of Llama 3 8B in a pipeline of four stages with two chunks each.

Run:     zjax train --config=configs/llama_8b_pipeline4.py
Needs:   tokens in data/llama, made by `zjax data prepare`;
         4 or more GPUs of 80 GiB whose number is 4 times a power of two, at most 64.
Expect:  four stages of eight layers, which share the vocabulary. With 16 microbatches
         8.6 % of the time is idle;
         `zjax plan --config=configs/llama_8b_pipeline4.py --num_devices=16 --schedule`
         plots it.
"""

from zjax import config as zconfig


def get_config():
    config = zconfig.base()
    config.directory = "runs/llama_8b_pipeline4"
    config.num_steps = 20_000
    config.global_batch_size = 256
    config.num_microbatches = 16

    config.mesh.pipeline = 4
    config.pipeline = "interleaved"
    config.zero.stage = 1

    config.model.num_layers = 32
    config.model.embed_size = 4_096
    config.model.mlp_size = 14_336
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
    config.model.tied_head = False
    config.data.source = "tokens"
    config.data.path = "data/llama"

    config.optimizer.peak_learning_rate = 1e-4
    config.optimizer.schedule.num_warmup_steps = 1_000
    return config
