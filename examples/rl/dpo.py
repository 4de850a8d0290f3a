"""DPO from the supervised start: a right and a wrong text of each prompt.

Run: zjax train --config=examples/rl/dpo.py
"""

import pathlib

import zjax

SUPERVISED = pathlib.Path(__file__).with_name("supervised.py")


def get_config():
    return zjax.load_config(
        SUPERVISED,
        {
            "directory": "runs/rl/sums/dpo",
            "num_steps": 60,
            "data.path": "runs/rl/sums/data/pairs",
            "preference": "dpo",
            "checkpoint.init_from": "runs/rl/sums/supervised",
            "optimizer.peak_learning_rate": 2e-5,
            "optimizer.schedule.num_warmup_steps": 5,
            "optimizer.weight_decay": 0.0,
            "evaluation.every_steps": 0,
        },
    )
