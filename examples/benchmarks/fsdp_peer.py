"""torch FSDP2 on a GPT.

python -m torch.distributed.run --nproc_per_node=2 examples/benchmarks/fsdp_peer.py
    --num_layers=48 --embed_size=1600 --num_heads=25 --vocab_size=50304 --length=1024
    --microbatch_size=16 --reshard=0 --compile=blocks_and_loss
"""

import functools

import torch
import torch.distributed as dist
import torch_gpt
from shape import Shape, shape_of
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch_gpt import DEVICE, GPT


def make_model(shape: Shape, compile_parts: str, reshard: bool, ahead: int) -> GPT:
    """Sharded before any parameter takes memory; gathers `ahead` blocks in advance."""
    with torch.device("meta"):
        model = GPT(shape)
    model.compile_parts(compile_parts)
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16
    )
    shard = functools.partial(fully_shard, mp_policy=precision)
    for block in model.blocks:
        shard(block, reshard_after_forward=reshard)
    # The tied table is needed again at once by the backward pass, so it stays.
    shard(model, reshard_after_forward=False)
    if ahead:
        prefetch(list(model.blocks), ahead)
    model.to_empty(device=DEVICE)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def prefetch(blocks: list[torch.nn.Module], ahead: int) -> None:
    """What FSDP2 does by itself is to gather one block ahead, backward alone."""
    for number, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 1 + ahead])
        before = blocks[max(0, number - ahead) : number]
        block.set_modules_to_backward_prefetch(before[::-1])


def main() -> None:
    parser = torch_gpt.make_torch_parser("torch FSDP2 on a GPT")
    parser.add_argument("--reshard", type=int, choices=(0, 1), required=True)
    parser.add_argument("--prefetch", type=int, default=0, help="blocks, both ways")
    given = parser.parse_args()
    shape = shape_of(given)
    with torch_gpt.prepared(given.attention):
        dist.init_process_group("nccl" if torch_gpt.IS_CUDA else "gloo")
        model = make_model(shape, given.compile, bool(given.reshard), given.prefetch)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        batch = torch_gpt.make_batch(shape)

        def step() -> torch.Tensor:
            for number in range(given.num_microbatches):
                is_last = number == given.num_microbatches - 1
                model.set_requires_gradient_sync(is_last)
                loss = model(batch)
                (loss / given.num_microbatches).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        torch_gpt.time_and_print(given, step, packages=("torch",))


if __name__ == "__main__":
    main()
