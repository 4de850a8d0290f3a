"""The shape of Mixtral 8x7B: 46.7B parameters, of which 12.9B are active, under ZeRO-3.

Published in arXiv:2401.04088, for longer sequences.

Run:     zjax train --config=configs/mixtral_8x7b.py
Needs:   tokens in data/mixtral, made by `zjax data prepare`;
         16, 32, 64, 128 or 256 GPUs of 80 GiB; 8 neighbours share the experts.
Expect:  on 64 GPUs about 13 GB of state on each, plus activations.
         `zjax plan --config=configs/mixtral_8x7b.py --num_devices=64` lists all.
Text:    zjax generate --run=runs/mixtral_8x7b --prompt="Once" --max_rows=64
         zjax serve --run=runs/mixtral_8x7b --max_rows=64
         zjax plan --generate --config=mixtral_8x7b --num_devices=8 --device=H200
"""

from zjax import config as zconfig


def get_config():
    config = zconfig.base()
    config.directory = "runs/mixtral_8x7b"
    config.num_steps = 20_000
    config.global_batch_size = 256
    config.microbatch_size = 1

    config.mesh.expert = 8
    config.zero.stage = 3

    config.model.num_layers = 32
    config.model.embed_size = 4_096
    config.model.mlp_size = 14_336
    config.model.num_heads = 32
    config.model.num_kv_heads = 8
    config.model.vocab_size = 32_000
    config.model.max_length = 4_096
    config.model.moe.num_experts = 8
    config.model.moe.top_k = 2
    config.model.moe.balance_loss = 0.02
    config.model.norm = "rms_norm"
    config.model.positions = "rotary"
    config.model.positions.theta = 1_000_000.0
    config.model.activation = "swiglu"
    config.model.use_bias = False
    config.model.tied_head = False
    config.model.remat = "full"
    config.data.source = "tokens"
    config.data.path = "data/mixtral"

    config.optimizer.peak_learning_rate = 1e-4
    config.optimizer.schedule.num_warmup_steps = 1_000
    return config
