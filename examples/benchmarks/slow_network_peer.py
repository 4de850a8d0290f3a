"""Torch's DistributedDataParallel over Gloo, with a hook that compresses gradients.

`examples/slow_network/train.py --methods=torch_powersgd` starts it: a process per rank,
with the batches, the model and the learning rates of zjax in a file.
"""

import argparse
import json
import math
import os
import pathlib

import numpy as np
import records
import torch
import torch.distributed as dist
from shape import Shape
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch_gpt import GPT

POWERSGD_RANK = 4
POWERSGD_WARM_UP = 20
"""Steps before gradients are compressed."""
BUCKET_MEGABYTES = 25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", required=True)
    parser.add_argument("--hook", choices=tuple(HOOKS), required=True)
    parser.add_argument("--setup", type=json.loads, required=True)
    parser.add_argument("--text", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    given = parser.parse_args()
    text = np.load(given.text)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    path = given.output if dist.get_rank() == 0 else None
    header = {"method": given.method, "setup": given.setup}
    train(text, HOOKS[given.hook], records.Recorder(path, header))
    dist.destroy_process_group()


def train(text, add_hook, recorder: records.Recorder) -> None:
    settings = json.loads(str(text["settings"]))
    own = slice(dist.get_rank(), None, dist.get_world_size())
    shape = Shape(**settings["shape"], microbatch_size=text["train"][0, own].shape[0])
    model = DistributedDataParallel(make_model(shape), bucket_cap_mb=BUCKET_MEGABYTES)
    add_hook(model)
    optimizer = make_optimizer(model, **settings["adam"])
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, step / settings["num_warmup_steps"])
    )
    num_steps, every = len(text["train"]), settings["evaluate_every"]
    for number, batch in enumerate(text["train"], start=1):
        with recorder.step(number) as record:
            loss = model(torch.from_numpy(batch[own]).long())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            record["loss"] = loss.item()
        if number % every == 0 or number == num_steps:
            recorder.evaluation(number, evaluate(model.module, text["held_out"]))


def make_model(shape: Shape) -> GPT:
    """A GPT that starts as GPT-2 and zjax do: residual branches are scaled down."""
    model = GPT(shape)
    with torch.no_grad():
        for block in model.blocks:
            for last in (block.output, block.down):
                last.weight /= math.sqrt(2 * shape.num_layers)
    return model


def make_optimizer(model, *, weight_decay: float, **settings) -> torch.optim.AdamW:
    """AdamW that decays matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, fused=True, **settings)


@torch.no_grad()
def evaluate(model: GPT, batches: np.ndarray) -> float:
    """Mean loss on held-out text, the same in each process."""
    losses = [model(torch.from_numpy(batch).long()).item() for batch in batches]
    return float(np.mean(losses))


def add_bfloat16(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)


def add_powersgd(model: DistributedDataParallel) -> None:
    state = powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=POWERSGD_RANK,
        start_powerSGD_iter=POWERSGD_WARM_UP,
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


HOOKS = {
    "none": lambda model: None,
    "bfloat16": add_bfloat16,
    "powersgd": add_powersgd,
}

if __name__ == "__main__":
    main()
