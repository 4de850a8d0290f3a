"""SonicMoE's layer of experts, both passes, timed layer by layer.

python examples/benchmarks/moe_sonic.py [--only=PART_OF_A_NAME]

It compiles its kernels at the first call, which takes minutes.
"""

import argparse

import call_timing
import moe_cases as cases
import torch
from sonicmoe import MoE
from sonicmoe.enums import ActivationType

DEVICE = "cuda"


def make_call(layer):
    """Both passes; its balance loss is computed, and has no gradient."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        module = MoE(
            layer.num_experts,
            layer.top_k,
            layer.embed_size,
            layer.mlp_size,
            ActivationType.SWIGLU,
            add_bias=False,
            std=layer.embed_size**-0.5,
        ).to(torch.bfloat16)
        tokens = layer.num_tokens, layer.embed_size
        x, d_out = torch.randn(2, *tokens, dtype=torch.bfloat16)
    inputs = x.requires_grad_(), *module.parameters()
    return lambda: torch.autograd.grad(module(x)[0], inputs, d_out)


def main() -> None:
    layers, _ = cases.choose_layers(argparse.ArgumentParser())
    metrics = {}
    for layer in layers:
        ways = {"SonicMoE": make_call(layer)}
        metrics |= cases.time_layer(layer, ways, lambda _: torch.cuda.synchronize())
    call_timing.print_result(
        metrics,
        device=torch.cuda.get_device_name(),
        packages=("torch", "sonic-moe", "quack-kernels", "nvidia-cutlass-dsl"),
    )


if __name__ == "__main__":
    main()
