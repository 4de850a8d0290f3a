"""PPO of Qwen2.5-1.5B-Instruct on countdown: a critic values each token.

Published in arXiv:1707.06347; the reference of each token is of arXiv:2203.02155.

Run:     zjax rl --config=configs/qwen2p5_1p5b_ppo.py
Needs:   the checkpoint in checkpoints/Qwen2.5-1.5B-Instruct;
         `zjax data prepare` of any text with its tokenizer.json in data/qwen2p5;
         python examples/rl/data.py --task=countdown --output=data/countdown
         GPUs of 80 GiB whose number divides 256.
Expect:  four updates on each rollout; not measured at full length.
         `zjax plan --config=configs/qwen2p5_1p5b_ppo.py --num_devices=8` lists all.
"""

from zjax import config as zconfig


def get_config():
    config = zconfig.base()
    config.directory = "runs/qwen2p5_1p5b_ppo"
    config.num_steps = 800
    config.global_batch_size = 256
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
    config.data.path = "data/qwen2p5"

    config.rl.objective = "ppo"
    config.rl.prompts = "data/countdown/prompts.jsonl"
    config.rl.rewards = [{"function": "zjax.rl.tasks.countdown:reward"}]
    config.rl.rollout.max_new_tokens = 1_024
    config.rl.rollout.num_prompts = 1_024
    config.rl.rollout.num_samples = 1
    config.rl.reference = "reward"
    config.rl.reference.coefficient = 0.001
    config.rl.evaluation_prompts = "data/countdown/held_out.jsonl"
    config.evaluation.every_steps = 50
    config.evaluation.num_batches = -1

    config.optimizer.schedule = "constant"
    config.optimizer.schedule.num_warmup_steps = 10
    config.optimizer.peak_learning_rate = 1e-6
    config.optimizer.weight_decay = 0.0
    return config
