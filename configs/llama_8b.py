"""The shape of Llama 3 8B, under ZeRO-3.

Run:     zjax train --config=configs/llama_8b.py
Needs:   tokens in data/llama, made by `zjax data prepare`;
         8 or more GPUs of 80 GiB whose number divides 256.
Expect:  on 64 GPUs about 2.3 GB of state on each, plus activations.
         `zjax plan --config=configs/llama_8b.py --num_devices=64` lists all.
Text:    zjax generate --run=runs/llama_8b --prompt="Once" --max_rows=64
         zjax serve --run=runs/llama_8b --max_rows=64
         zjax plan --generate --config=llama_8b --num_devices=1 --device=H200
"""

from zjax import config as zconfig


def get_config():
    config = zconfig.base()
    config.directory = "runs/llama_8b"
    config.num_steps = 20_000
    config.global_batch_size = 256
    config.microbatch_size = 1

    config.zero.stage = 3

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
