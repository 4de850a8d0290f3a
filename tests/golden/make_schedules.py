"""Writes the learning rates and momenta of DeepSpeed's schedulers.

python tests/golden/make_schedules.py

It needs deepspeed, with torch. Update n of an engine has the rate of `rates[n]`: its
scheduler steps after its optimizer. The weight starts at 0, and the gradient of update
n is cos(n).
"""

import json
import math
import os
import pathlib

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
from deepspeed.runtime import lr_schedules

OUTPUT = pathlib.Path(__file__).parent / "schedules.json"
BOUNDS = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}
ENDS = {"total_num_steps": 40, "warmup_num_steps": 10}
LINEAR = {"warmup_type": "linear"}
CASES = [
    ("OneCycle", {**BOUNDS, "cycle_first_step_size": 10}),
    (
        "OneCycle",
        {
            **BOUNDS,
            "cycle_first_step_size": 7,
            "cycle_second_step_size": 12,
            "decay_step_size": 3,
            "decay_lr_rate": 0.5,
            "cycle_min_mom": 0.7,
            "cycle_max_mom": 0.85,
            "decay_mom_rate": 0.01,
        },
    ),
    (
        "OneCycle",
        {
            **BOUNDS,
            "cycle_first_step_size": 9,
            "cycle_second_step_size": 14,
            "cycle_first_stair_count": 4,
            "cycle_second_stair_count": 5,
            "decay_lr_rate": 0.5,
        },
    ),
    (
        "OneCycle",
        {
            **BOUNDS,
            "cycle_first_step_size": 12,
            "cycle_first_stair_count": 3,
            "cycle_momentum": False,
        },
    ),
    ("OneCycle", {**BOUNDS, "cycle_first_step_size": 6, "cycle_second_step_size": 0}),
    ("LRRangeTest", {}),
    (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": 1e-4,
            "lr_range_test_step_size": 5,
            "lr_range_test_step_rate": 0.75,
        },
    ),
    (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": 1e-4,
            "lr_range_test_step_size": 4,
            "lr_range_test_step_rate": 2.0,
            "lr_range_test_staircase": True,
        },
    ),
    ("WarmupLR", {"warmup_max_lr": 2e-3, "warmup_num_steps": 10}),
    ("WarmupLR", {"warmup_max_lr": 2e-3, "warmup_num_steps": 10, **LINEAR}),
    ("WarmupLR", {"warmup_max_lr": 2e-3, "warmup_num_steps": 1}),
    ("WarmupDecayLR", {"warmup_max_lr": 2e-3, **ENDS}),
    ("WarmupDecayLR", {**ENDS, **LINEAR}),
    ("WarmupCosineLR", ENDS),
    ("WarmupCosineLR", {**ENDS, **LINEAR, "cos_min_ratio": 0.2}),
]
NUM_STEPS = 48


def course(name, params):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([weight], weight_decay=0.0)
    scheduler = getattr(lr_schedules, name)(optimizer, **params)
    found = {"rates": [], "betas": [], "weights": []}
    for step in range(NUM_STEPS):
        group = optimizer.param_groups[0]
        found["rates"].append(group["lr"])
        found["betas"].append(group["betas"])
        weight.grad = torch.full((1,), math.cos(step))
        optimizer.step()
        found["weights"].append(weight.item())
        scheduler.step()
    return {"type": name, "params": params, **found}


def main():
    lines = [json.dumps(course(*case)) for case in CASES]
    OUTPUT.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
