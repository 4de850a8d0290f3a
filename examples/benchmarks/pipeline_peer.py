"""DeepSpeed's pipeline on a GPT: a stage per device.

python -m torch.distributed.run --nproc_per_node=4 examples/benchmarks/pipeline_peer.py
    --num_layers=32 --embed_size=4096 --num_heads=32 --vocab_size=50304 --length=4096
    --microbatch_size=1 --num_microbatches=16 --recompute
"""

import argparse
import functools
import itertools
from collections.abc import Iterator

import deepspeed
import torch
import torch.distributed as dist
import torch_gpt
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from shape import Shape, shape_of
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch_gpt import DEVICE, Block, Embedding

TOKENS = "tokens"
"""Key of the table that the first and the last stage share."""


class Positions(Embedding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(torch.arange(x.shape[1], device=x.device))


def project(table: Embedding, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, table.weight)


def make_settings(shape: Shape, num_microbatches: int) -> dict:
    """ZeRO-1 with gradients summed in float32; stages 2 and 3 know no pipeline."""
    return {
        "train_micro_batch_size_per_gpu": shape.microbatch_size,
        "gradient_accumulation_steps": num_microbatches,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


def make_model(shape: Shape, given: argparse.Namespace) -> PipelineModule:
    """Each process has the layers of its stage."""
    width, layers = shape.embed_size, range(shape.num_layers)
    table = (TOKENS, Embedding, shape.vocab_size, width)
    whole_loss = given.compile == "blocks_and_loss"
    loss = torch_gpt.token_loss
    with DEVICE:
        model = PipelineModule(
            [
                TiedLayerSpec(*table),
                LayerSpec(Positions, shape.length, width),
                *(LayerSpec(Block, width, shape.num_heads) for _ in layers),
                LayerSpec(nn.LayerNorm, width),
                TiedLayerSpec(*table, forward_fn=project),
            ],
            num_stages=dist.get_world_size(),
            loss_fn=torch.compile(loss) if whole_loss else loss,
            partition_method="parameters",
            activation_checkpoint_interval=int(given.recompute),
            activation_checkpoint_func=functools.partial(
                checkpoint, use_reentrant=False
            ),
            checkpointable_layers=[Block.__name__],
        )
    for layer in model.forward_funcs:
        if isinstance(layer, Block) and given.compile != "none":
            layer.compile()
    return model


def make_batches(
    shape: Shape, num_microbatches: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets of one repeated batch, the same in each process."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    size = (num_microbatches, shape.microbatch_size, shape.length + 1)
    tokens = torch.randint(shape.vocab_size, size, device=DEVICE, generator=generator)
    return itertools.cycle((part[:, :-1], part[:, 1:]) for part in tokens)


def main() -> None:
    parser = torch_gpt.make_torch_parser("DeepSpeed's pipeline on a GPT")
    parser.add_argument("--recompute", action="store_true", help="blocks, in full")
    given = parser.parse_args()
    shape = shape_of(given)
    with torch_gpt.prepared(given.attention):
        deepspeed.init_distributed()
        model = make_model(shape, given)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-4, weight_decay=0.1, betas=(0.9, 0.95), fused=True
        )
        settings = make_settings(shape, given.num_microbatches)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings
        )
        batches = make_batches(shape, given.num_microbatches)
        torch_gpt.time_and_print(
            given,
            lambda: engine.train_batch(data_iter=batches),
            packages=("torch", "deepspeed"),
            num_sharing=dist.get_world_size(),
        )


if __name__ == "__main__":
    main()
