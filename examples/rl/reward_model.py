"""Reward model: which of two texts of a prompt the verifier accepts.

Run: zjax train --config=examples/rl/reward_model.py
"""

import pathlib

import zjax

DPO = pathlib.Path(__file__).with_name("dpo.py")


def get_config():
    return zjax.load_config(
        DPO,
        {
            "directory": "runs/rl/sums/reward_model",
            "preference": "reward_model",
            "optimizer.peak_learning_rate": 1e-3,
        },
    )
