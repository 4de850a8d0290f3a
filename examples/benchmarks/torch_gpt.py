"""A GPT-2 shaped decoder in torch, and what both torch peers share around it."""

import argparse
import contextlib
import functools
import os
from collections.abc import Callable, Iterator

import timing
import torch
import torch.distributed as dist
from shape import Shape, make_parser, shape_of
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

INITIAL_SCALE = 0.02
IS_CUDA = torch.cuda.is_available()
DEVICE = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if IS_CUDA else "cpu")
ATTENTION = {
    "default": None,
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
}
"""Kernels in the order of preference; `default` is torch's own choice."""
COMPILED = ("none", "loss", "blocks", "blocks_and_loss", "forwards_and_loss")
"""What `torch.compile` is given."""


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INITIAL_SCALE)
        nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INITIAL_SCALE)


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = Linear(width, 3 * width)
        self.output = Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = Linear(width, 4 * width)
        self.down = Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attend(x)
        hidden = functional.gelu(self.up(self.mlp_norm(x)), approximate="tanh")
        return x + self.down(hidden)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.query_key_value(self.attention_norm(x))
        heads = heads.view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        return x + self.output(mixed.transpose(1, 2).reshape(batch, length, width))


class GPT(nn.Module):
    def __init__(self, shape: Shape, *, recompute: bool = False):
        super().__init__()
        self.recompute = recompute
        width = shape.embed_size
        self.tokens = Embedding(shape.vocab_size, width)
        self.positions = Embedding(shape.length, width)
        layers = range(shape.num_layers)
        self.blocks = nn.ModuleList(Block(width, shape.num_heads) for _ in layers)
        self.norm = nn.LayerNorm(width)
        self.loss: Callable[..., torch.Tensor] = token_loss

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        places = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.tokens(inputs) + self.positions(places)
        for block in self.blocks:
            run = functools.partial(checkpoint, block, use_reentrant=False)
            x = run(x) if self.recompute else block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return self.loss(logits, targets)

    def compile_parts(self, parts: str) -> None:
        """Compiles the named parts, such as `blocks_and_loss`.

        `forwards` are those of the blocks without the hooks around them.
        """
        names = parts.split("_and_")
        for block in self.blocks:
            if "blocks" in names:
                block.compile()
            if "forwards" in names:
                block.forward = torch.compile(block.forward)
        if "loss" in names:
            self.loss = torch.compile(token_loss)


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.reshape(-1))


def make_torch_parser(description: str) -> argparse.ArgumentParser:
    parser = make_parser(description)
    parser.add_argument("--num_microbatches", type=int, default=1)
    parser.add_argument("--compile", choices=COMPILED, default="none")
    parser.add_argument("--attention", choices=tuple(ATTENTION), default="cudnn")
    return parser


@contextlib.contextmanager
def prepared(attention: str) -> Iterator[None]:
    """Device, seed, TF32 for what is left in float32, and the attention kernel."""
    if IS_CUDA:
        torch.cuda.set_device(DEVICE)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    order = ATTENTION[attention]
    with sdpa_kernel(order, set_priority=True) if order else contextlib.nullcontext():
        yield


def make_batch(shape: Shape) -> torch.Tensor:
    """Random tokens, others in each process."""
    generator = torch.Generator(DEVICE).manual_seed(dist.get_rank())
    size = (shape.microbatch_size, shape.length + 1)
    return torch.randint(shape.vocab_size, size, device=DEVICE, generator=generator)


def settle(loss: torch.Tensor) -> float:
    """Waits for the device; the loss of this process as a number."""
    if IS_CUDA:
        torch.cuda.synchronize()
    return loss.item()


def time_and_print(
    given: argparse.Namespace,
    step: Callable[[], torch.Tensor],
    packages: tuple[str, ...],
    num_sharing: int = 1,
) -> None:
    """Times the steps of all processes; the first one prints.

    Processes that share a microbatch count a part of it each.
    """
    seconds, losses = timing.time_steps(step, settle)
    peak = torch.cuda.max_memory_allocated() if IS_CUDA else 0
    most = torch.tensor(peak, device=DEVICE)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        timing.print_result(
            shape_of(given),
            seconds,
            losses,
            device=torch.cuda.get_device_name() if IS_CUDA else "cpu",
            num_devices=dist.get_world_size(),
            peak_bytes=most.item() or None,
            packages=packages,
            num_microbatches=given.num_microbatches / num_sharing,
        )
    dist.destroy_process_group()
