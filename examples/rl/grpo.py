"""GRPO from the supervised start: learns which of eight texts a verifier accepts.

Run: zjax rl --config=examples/rl/grpo.py
"""

import pathlib

import zjax

SUPERVISED = pathlib.Path(__file__).with_name("supervised.py")


def get_config():
    return zjax.load_config(
        SUPERVISED,
        {
            "directory": "runs/rl/sums/grpo",
            "num_steps": 200,
            "global_batch_size": 0,
            "checkpoint.init_from": "runs/rl/sums/supervised",
            "optimizer.peak_learning_rate": 5e-4,
            "optimizer.schedule.num_warmup_steps": 5,
            "optimizer.weight_decay": 0.0,
            "rl.objective": "grpo",
            "rl.prompts": "runs/rl/sums/data/prompts.jsonl",
            "rl.rewards": [{"function": "zjax.rl.tasks.sums:reward"}],
            "rl.rollout.num_prompts": 32,
            "rl.rollout.num_samples": 8,
            "rl.rollout.max_new_tokens": 32,
            "rl.evaluation_prompts": "runs/rl/sums/data/held_out.jsonl",
            "rl.evaluation_samples": 8,
            "evaluation.every_steps": 0,
            "evaluation.num_batches": -1,
        },
    )
