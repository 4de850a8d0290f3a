"""A GPT with DeepSpeed's mixtures in every second layer, whole steps.

python -m torch.distributed.run --nproc_per_node=1
    examples/benchmarks/moe_step_deepspeed.py --num_experts=64 --num_layers=4
    --embed_size=2048 --num_heads=16 --vocab_size=50304 --length=2048
    --microbatch_size=8 --compile=blocks_and_loss

A token has one expert or, beyond a capacity factor of 1, none; without Tutel and
without random numbers. Weights and moments are bfloat16, routers float32.
"""

import deepspeed
import torch
import torch_gpt
from deepspeed.moe.layer import MoE
from shape import shape_of
from torch import nn
from torch.nn import functional
from torch_gpt import DEVICE, GPT, Block, Linear

BALANCE_WEIGHT = 0.01


@torch.compile
def feed_forward(x, up, up_bias, down, down_bias):
    hidden = functional.linear(x, up, up_bias)
    hidden = functional.gelu(hidden, approximate="tanh")
    return functional.linear(hidden, down, down_bias)


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = Linear(width, 4 * width)
        self.down = Linear(4 * width, width)

    def forward(self, x):
        up, down = self.up, self.down
        return feed_forward(x, up.weight, up.bias, down.weight, down.bias)


class MixtureBlock(Block):
    """A block with a mixture; its balance loss is left in `balance_loss`."""

    def __init__(self, width, num_heads, num_experts):
        super().__init__(width, num_heads)
        del self.up, self.down
        self.mixture = MoE(
            width, Expert(width), num_experts, use_rts=False, capacity_factor=1.0
        )

    def forward(self, x):
        x = self.attend(x)
        out, self.balance_loss, _ = self.mixture(self.mlp_norm(x))
        return x + out

    def compile(self):
        self.attend = torch.compile(self.attend)


class MixtureGPT(GPT):
    """Experts in the second, fourth, ... layer."""

    def __init__(self, shape, num_experts):
        super().__init__(shape)
        size = shape.embed_size, shape.num_heads, num_experts
        self.mixtures = [MixtureBlock(*size) for _ in self.blocks[1::2]]
        for number, block in enumerate(self.mixtures):
            self.blocks[2 * number + 1] = block
        self.to(torch.bfloat16)
        for block in self.mixtures:
            block.mixture.deepspeed_moe.gate.float()

    def forward(self, tokens):
        loss = super().forward(tokens)
        balance = sum(block.balance_loss for block in self.mixtures)
        return loss + BALANCE_WEIGHT * balance


def main() -> None:
    parser = torch_gpt.make_torch_parser("DeepSpeed-MoE in a GPT")
    parser.add_argument("--num_experts", type=int, required=True)
    given = parser.parse_args()
    shape = shape_of(given)
    settings = {
        "train_micro_batch_size_per_gpu": shape.microbatch_size,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
    }
    with torch_gpt.prepared(given.attention):
        deepspeed.init_distributed()
        with DEVICE:
            model = MixtureGPT(shape, given.num_experts)
        model.compile_parts(given.compile)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings
        )
        batch = torch_gpt.make_batch(shape)

        def step() -> torch.Tensor:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        torch_gpt.time_and_print(given, step, packages=("torch", "deepspeed"))


if __name__ == "__main__":
    main()
