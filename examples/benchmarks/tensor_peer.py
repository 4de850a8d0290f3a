"""torch tensor parallelism on a GPT: parallelize_module, compiled, norms split too.

python -m torch.distributed.run --nproc_per_node=4 examples/benchmarks/tensor_peer.py
    --num_layers=32 --embed_size=4096 --num_heads=32 --vocab_size=50304 --length=4096
    --microbatch_size=4 --compile=blocks --asynchronous=1

The sequences of a microbatch are those of all devices together. As in torchtitan, FSDP2
over one data share gives the precision.
"""

import torch
import torch.distributed as dist
import torch_gpt
from shape import Shape, shape_of
from torch import nn
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch_gpt import DEVICE, GPT, INITIAL_SCALE, Block, Linear

OF_MODEL = {
    "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
    "norm": SequenceParallel(),
}
OF_BLOCK = {
    "attention_norm": SequenceParallel(),
    "query_key_value": ColwiseParallel(input_layouts=Shard(1)),
    "output": RowwiseParallel(output_layouts=Shard(1)),
    "output_bias": SequenceParallel(use_local_output=True),
    "mlp_norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
    "down_bias": SequenceParallel(use_local_output=True),
}


class Columns(Linear):
    """Its bias is a sum of its own: torch fuses no gather with a biased product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight) + self.bias


class Rows(nn.Linear):
    """Without the bias, which is added where the sum of all devices is scattered."""

    def __init__(self, entering: int, leaving: int):
        super().__init__(entering, leaving, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INITIAL_SCALE)


class Bias(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.bias = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


class SplitBlock(Block):
    """The same block with the columns of a head side by side, so that heads split."""

    def __init__(self, width: int, num_heads: int):
        super().__init__(width, num_heads)
        self.query_key_value = Columns(width, 3 * width)
        self.output, self.output_bias = Rows(width, width), Bias(width)
        self.up = Columns(width, 4 * width)
        self.down, self.down_bias = Rows(4 * width, width), Bias(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        head_size = self.output.in_features // self.num_heads
        heads = self.query_key_value(self.attention_norm(x))
        heads = heads.view(*heads.shape[:2], -1, 3, head_size)
        query, key, value = heads.permute(3, 0, 2, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        x = x + self.output_bias(self.output(mixed.transpose(1, 2).flatten(2)))
        hidden = functional.gelu(self.up(self.mlp_norm(x)), approximate="tanh")
        return x + self.down_bias(self.down(hidden))


class SplitGPT(GPT):
    """The same decoder with logits that stay split."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        places = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.tokens(inputs) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x).redistribute(placements=[Replicate()])
        return self.loss(functional.linear(x, self.tokens.weight), targets)


def make_model(shape: Shape, mesh: DeviceMesh, compile_parts: str) -> GPT:
    """Split before any parameter takes memory."""
    with torch.device("meta"):
        model = SplitGPT(shape)
        layers = range(shape.num_layers)
        blocks = (SplitBlock(shape.embed_size, shape.num_heads) for _ in layers)
        model.blocks = nn.ModuleList(blocks)
    parallelize_module(model, mesh["tensor"], OF_MODEL)
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], OF_BLOCK)
    model.compile_parts(compile_parts)
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16
    )
    for module in (*model.blocks, model):
        fully_shard(
            module, mesh=mesh["data"], mp_policy=precision, reshard_after_forward=False
        )
    model.to_empty(device=DEVICE)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def make_batch(shape: Shape) -> torch.Tensor:
    """Random tokens, the same in each process."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    size = (shape.microbatch_size, shape.length + 1)
    return torch.randint(shape.vocab_size, size, device=DEVICE, generator=generator)


def main() -> None:
    parser = torch_gpt.make_torch_parser("torch tensor parallelism on a GPT")
    parser.add_argument("--asynchronous", type=int, choices=(0, 1), required=True)
    given = parser.parse_args()
    shape = shape_of(given)
    with torch_gpt.prepared(given.attention):
        dist.init_process_group("nccl" if torch_gpt.IS_CUDA else "gloo")
        mesh = init_device_mesh(
            DEVICE.type, (1, dist.get_world_size()), mesh_dim_names=("data", "tensor")
        )
        if given.asynchronous:
            torch._inductor.config._micro_pipeline_tp = True
            enable_symm_mem_for_group(mesh["tensor"].get_group().group_name)
        model = make_model(shape, mesh, given.compile)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        batch = make_batch(shape)

        def step() -> torch.Tensor:
            for _ in range(given.num_microbatches):
                with loss_parallel():
                    loss = model(batch)
                    (loss / given.num_microbatches).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            loss = loss.detach()
            return loss.full_tensor() if isinstance(loss, DTensor) else loss

        torch_gpt.time_and_print(
            given, step, packages=("torch",), num_sharing=dist.get_world_size()
        )


if __name__ == "__main__":
    main()
