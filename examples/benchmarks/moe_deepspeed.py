"""DeepSpeed's mixture of experts, both passes, timed layer by layer.

python -m torch.distributed.run --nproc_per_node=1 examples/benchmarks/moe_deepspeed.py
    [--only=PART_OF_A_NAME]

Without Tutel and without random numbers. The experts run eagerly and compiled; the
faster counts.
"""

import argparse

import call_timing
import deepspeed
import moe_cases as cases
import torch
from deepspeed.moe.layer import MoE
from torch import nn
from torch.nn import functional as F

DEVICE = "cuda"


def feed_forward(x, up, down):
    return F.linear(F.gelu(F.linear(x, up), approximate="tanh"), down)


class Expert(nn.Module):
    """Two matrices without biases, around GELU."""

    def __init__(self, layer, run):
        super().__init__()
        self.run = run
        self.up = nn.Parameter(torch.empty(layer.mlp_size, layer.embed_size))
        self.down = nn.Parameter(torch.empty(layer.embed_size, layer.mlp_size))

    def forward(self, x):
        return self.run(x, self.up, self.down)


def make_mixture(layer, run):
    expert = Expert(layer, run).to(torch.bfloat16)
    mixture = MoE(
        layer.embed_size,
        expert,
        layer.num_experts,
        k=layer.top_k,
        capacity_factor=1.0,
        drop_tokens=True,
        use_rts=False,
        top2_2nd_expert_sampling=False,
    )
    for parameter in mixture.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    mixture.set_deepspeed_parallelism()
    return mixture


def make_call(layer, run):
    """Both passes."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        mixture = make_mixture(layer, run)
        tokens = 1, layer.num_tokens, layer.embed_size
        x, d_out = torch.randn(2, *tokens, dtype=torch.bfloat16)
        d_loss = torch.tensor(cases.BALANCE_WEIGHT)
    inputs = x.requires_grad_(), *mixture.parameters()

    def call():
        out, loss, _ = mixture(x)
        return torch.autograd.grad((out, loss), inputs, (d_out, d_loss))

    return call


def main() -> None:
    layers, _ = cases.choose_layers(argparse.ArgumentParser())
    deepspeed.init_distributed()
    runs = {"eager": feed_forward, "compiled": torch.compile(feed_forward)}
    metrics = {}
    for layer in layers:
        if layer.is_gated:
            continue
        ways = {name: make_call(layer, run) for name, run in runs.items()}
        metrics |= cases.time_layer(layer, ways, lambda _: torch.cuda.synchronize())
    device = torch.cuda.get_device_name()
    call_timing.print_result(metrics, device=device, packages=("torch", "deepspeed"))


if __name__ == "__main__":
    main()
