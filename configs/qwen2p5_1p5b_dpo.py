"""DPO of Qwen2.5-1.5B-Instruct on pairs of a chosen and a rejected answer.

Published in arXiv:2305.18290.

Run:     zjax train --config=configs/qwen2p5_1p5b_dpo.py
Needs:   the checkpoint in checkpoints/Qwen2.5-1.5B-Instruct;
         pairs in data/pairs, made by `zjax data prepare --examples=pairs
         --chat=checkpoints/Qwen2.5-1.5B-Instruct`;
         GPUs of 80 GiB whose number divides 128.
Expect:  the margin of held-out pairs rises; not measured at full length.
         `zjax plan --config=configs/qwen2p5_1p5b_dpo.py --num_devices=8` lists all.
"""

from zjax import config as zconfig


def get_config():
    config = zconfig.base()
    config.directory = "runs/qwen2p5_1p5b_dpo"
    config.num_steps = 1_000
    config.global_batch_size = 128
    config.microbatch_size = 8
    config.checkpoint.init_from = "checkpoints/Qwen2.5-1.5B-Instruct"

    config.zero.stage = 3

    config.model.num_layers = 28
    config.model.embed_size = 1_536
    config.model.mlp_size = 8_960
    config.model.num_heads = 12
    config.model.num_kv_heads = 2
    config.model.vocab_size = 151_936
    config.model.max_length = 2_048
    config.model.norm = "rms_norm"
    config.model.norm_eps = 1e-6
    config.model.positions = "rotary"
    config.model.positions.theta = 1_000_000.0
    config.model.activation = "swiglu"
    config.model.use_bias = False
    config.model.attention_bias = "inputs"
    config.model.tied_head = True

    config.data.source = "tokens"
    config.data.path = "data/pairs"
    config.data.packing = "documents"

    config.preference = "dpo"

    config.optimizer.schedule = "constant"
    config.optimizer.schedule.num_warmup_steps = 10
    config.optimizer.peak_learning_rate = 1e-6
    config.optimizer.weight_decay = 0.0
    return config
