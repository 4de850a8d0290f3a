"""Mixtures of experts in torch, both passes, compiled, timed layer by layer.

python examples/benchmarks/moe_torch.py --how=grouped_mm|transformers
    [--only=PART_OF_A_NAME]

`grouped_mm` is a plain layer around torch's grouped product; of its two ways to move
tokens the faster counts. `transformers` is the block of Qwen3-MoE or Mixtral, with
`experts_implementation="grouped_mm"`.
"""

import argparse

import call_timing
import moe_cases as cases
import torch
from torch import nn
from torch.nn import functional as F

DEVICE = "cuda"


class Permute(torch.autograd.Function):
    """Rows in another order; their gradients are gathered, too, and not summed."""

    @staticmethod
    def forward(ctx, rows, order, inverse):
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx, d_rows):
        (inverse,) = ctx.saved_tensors
        return d_rows[inverse], None, None


class Mixture(nn.Module):
    """A router and experts with SwiGLU; matrices are stored as in `nn.Linear`."""

    def __init__(self, layer):
        super().__init__()
        embed, mlp, experts = layer.embed_size, layer.mlp_size, layer.num_experts
        self.top_k = layer.top_k
        self.router = nn.Parameter(torch.empty(experts, embed))
        self.up = nn.Parameter(torch.empty(experts, 2 * mlp, embed))
        self.down = nn.Parameter(torch.empty(experts, embed, mlp))

    def forward(self, x):
        scores = F.linear(x, self.router).float().softmax(-1)
        weights, experts = scores.topk(self.top_k)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        ordered, order = experts.flatten().sort()
        known = torch.arange(len(self.up), device=x.device)
        ends = torch.searchsorted(ordered, known, right=True, out_int32=True)
        return self.mix(x, weights, order, ends)

    def apply_experts(self, rows, ends):
        gate, value = F.grouped_mm(rows, self.up.mT, offs=ends).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * value, self.down.mT, offs=ends)


class AddingMixture(Mixture):
    """Adds the outputs of experts to the rows of their tokens."""

    def mix(self, x, weights, order, ends):
        token = order // self.top_k
        outputs = self.apply_experts(x.index_select(0, token), ends)
        outputs = outputs * weights.flatten()[order][:, None]
        return torch.zeros_like(x).index_add(0, token, outputs)


class PermutingMixture(Mixture):
    """Puts the outputs of experts back into the order of their tokens."""

    def mix(self, x, weights, order, ends):
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=x.device)
        rows = Permute.apply(x.repeat_interleave(self.top_k, 0), order, inverse)
        outputs = Permute.apply(self.apply_experts(rows, ends), inverse, order)
        return (outputs.view(*weights.shape, -1) * weights[..., None]).sum(1)


class TransformersMixture(nn.Module):
    """The block of a model of transformers."""

    def __init__(self, layer):
        super().__init__()
        sizes = {
            "hidden_size": layer.embed_size,
            "num_experts_per_tok": layer.top_k,
            "experts_implementation": "grouped_mm",
        }
        if layer.name == "Mixtral":
            from transformers.models.mixtral import modeling_mixtral as model

            config = model.MixtralConfig(
                intermediate_size=layer.mlp_size,
                num_local_experts=layer.num_experts,
                **sizes,
            )
            self.block = model.MixtralSparseMoeBlock(config)
        else:
            from transformers.models.qwen3_moe import modeling_qwen3_moe as model

            config = model.Qwen3MoeConfig(
                moe_intermediate_size=layer.mlp_size,
                num_experts=layer.num_experts,
                norm_topk_prob=True,
                **sizes,
            )
            self.block = model.Qwen3MoeSparseMoeBlock(config)

    def forward(self, x):
        return self.block(x[None])[0]


WAYS = {
    "grouped_mm": (PermutingMixture, AddingMixture),
    "transformers": (TransformersMixture,),
}


def make_call(layer, make_module):
    """Both passes, compiled at the first call."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        module = make_module(layer).to(torch.bfloat16)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        tokens = layer.num_tokens, layer.embed_size
        x, d_out = torch.randn(2, *tokens, dtype=torch.bfloat16)
    inputs = x.requires_grad_(), *module.parameters()
    compiled = torch.compile(module, dynamic=False)
    return lambda: torch.autograd.grad(compiled(x), inputs, d_out)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=WAYS, required=True)
    layers, given = cases.choose_layers(parser)
    metrics = {}
    for layer in layers:
        if not layer.is_gated:
            continue
        ways = {make.__name__: make_call(layer, make) for make in WAYS[given.how]}
        metrics |= cases.time_layer(layer, ways, lambda _: torch.cuda.synchronize())
    packages = ("torch", "transformers") if given.how == "transformers" else ("torch",)
    device = torch.cuda.get_device_name()
    call_timing.print_result(metrics, device=device, packages=packages)


if __name__ == "__main__":
    main()
