"""The shape of Qwen3-30B-A3B: 30.5B parameters, of which 3.4B are active, under ZeRO-3.

Published in arXiv:2505.09388.

Run:     zjax train --config=configs/qwen3_moe_30b.py
Needs:   tokens in data/qwen3, made by `zjax data prepare`;
         16, 32, 64, 128 or 256 GPUs of 80 GiB; 8 neighbours share the experts.
Expect:  on 64 GPUs about 8.6 GB of state on each, plus activations.
         `zjax plan --config=configs/qwen3_moe_30b.py --num_devices=64` lists all.
Text:    zjax generate --run=runs/qwen3_moe_30b --prompt="Once" --max_rows=64
         zjax serve --run=runs/qwen3_moe_30b --max_rows=64
         zjax plan --generate --config=qwen3_moe_30b --num_devices=8 --device=H200
"""

from zjax import config as zconfig


def get_config():
    config = zconfig.base()
    config.directory = "runs/qwen3_moe_30b"
    config.num_steps = 20_000
    config.global_batch_size = 256
    config.microbatch_size = 1

    config.mesh.expert = 8
    config.zero.stage = 3

    config.model.num_layers = 48
    config.model.embed_size = 2_048
    config.model.num_heads = 32
    config.model.num_kv_heads = 4
    config.model.head_size = 128
    config.model.query_key_norm = True
    config.model.vocab_size = 151_936
    config.model.max_length = 4_096
    config.model.norm_eps = 1e-6
    config.model.moe.num_experts = 128
    config.model.moe.top_k = 8
    config.model.moe.expert_size = 768
    config.model.moe.balance_loss = 0.001
    config.model.norm = "rms_norm"
    config.model.positions = "rotary"
    config.model.positions.theta = 1_000_000.0
    config.model.activation = "swiglu"
    config.model.use_bias = False
    config.model.tied_head = False
    config.model.remat = "full"
    config.data.source = "tokens"
    config.data.path = "data/qwen3"

    config.optimizer.peak_learning_rate = 1e-4
    config.optimizer.schedule.num_warmup_steps = 1_000
    return config
