"""GPT 350M with 128 experts in every second layer, as in DeepSpeed-MoE: 13.15B in all.

Published in arXiv:2201.05596. The vocabulary is padded to a multiple of 128. A token
has one expert of a layer, or none where all its places are taken.

Run:     zjax train --config=configs/moe_350m_128e.py
Needs:   tokens in data/gpt2, made by `zjax data prepare`;
         8, 16, 32 or 64 GPUs of 80 GiB; 8 neighbours share the experts.
Expect:  on 8 GPUs about 30 GB of state on each, plus activations.
         `zjax plan --config=configs/moe_350m_128e.py --num_devices=8` lists all.
"""

from zjax import config as zconfig


def get_config():
    config = zconfig.base()
    config.directory = "runs/moe_350m_128e"
    config.num_steps = 572_204
    config.global_batch_size = 256
    config.microbatch_size = 4

    config.mesh.expert = 8
    config.zero.stage = 2

    config.model.num_layers = 24
    config.model.embed_size = 1_024
    config.model.num_heads = 16
    config.model.vocab_size = 50_304
    config.model.max_length = 2_048
    config.model.moe.num_experts = 128
    config.model.moe.every = 2
    config.model.moe.drop = "random"
    config.data.source = "tokens"
    config.data.path = "data/gpt2"

    config.optimizer.peak_learning_rate = 2e-4
    config.optimizer.schedule.num_warmup_steps = 715
    config.optimizer.schedule.final_fraction = 0.01
    return config
