"""PPO from the supervised start, judged by a reward model in place of the verifier.

Run: zjax rl --config=examples/rl/ppo.py
"""

import pathlib

import zjax

GRPO = pathlib.Path(__file__).with_name("grpo.py")


def get_config():
    return zjax.load_config(
        GRPO,
        {
            "directory": "runs/rl/sums/ppo",
            "rl.objective": "ppo",
            "rl.rewards": [{"kind": "run", "directory": "runs/rl/sums/reward_model"}],
            "rl.rollout.num_prompts": 256,
            "rl.rollout.num_samples": 1,
            "rl.reference": "reward",
            "rl.reference.coefficient": 0.02,
            "rl.evaluation_prompts": "",
            "rl.evaluation_samples": 1,
        },
    )
