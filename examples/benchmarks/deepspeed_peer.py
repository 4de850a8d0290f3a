"""DeepSpeed ZeRO on a GPT.

python -m torch.distributed.run --nproc_per_node=2 examples/benchmarks/deepspeed_peer.py
    --num_layers=48 --embed_size=1600 --num_heads=25 --vocab_size=50304 --length=1024
    --microbatch_size=16 --stage=2
"""

import argparse
import contextlib
import json

import deepspeed
import torch
import torch_gpt
from deepspeed.ops.adam import DeepSpeedCPUAdam
from shape import Shape, shape_of
from torch_gpt import DEVICE, GPT

ADAM = {"lr": 1e-4, "weight_decay": 0.1, "betas": (0.9, 0.95)}
BLOCK = "torch_gpt.Block"
BUCKET_ELEMENTS = 200_000_000
TILE_ELEMENTS = 200_000_000
"""Of an update with its state on disks: read, updated and written in turn."""
BUFFERS = 12
"""Weights, two moments and gradients of the tile in each of the three states; the
default of 4 ends in a failed assertion."""
ON_DISKS = {
    "block_size": 2**20,
    "queue_depth": 32,
    "intra_op_parallelism": 4,
    "overlap_events": True,
}


def make_settings(shape: Shape, given: argparse.Namespace) -> dict:
    settings = {
        "train_micro_batch_size_per_gpu": shape.microbatch_size,
        "gradient_accumulation_steps": given.num_microbatches,
        "gradient_clipping": given.clip_norm,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": given.stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "allgather_bucket_size": BUCKET_ELEMENTS,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if given.offload:
        place = {"device": given.offload, "pin_memory": True}
        if given.offload == "nvme":
            place |= {
                "nvme_path": given.nvme_path,
                "pipeline_read": True,
                "pipeline_write": True,
                "buffer_count": BUFFERS,
            }
            settings["aio"] = ON_DISKS
            settings["zero_optimization"]["sub_group_size"] = TILE_ELEMENTS
        settings["zero_optimization"]["offload_optimizer"] = place
    if given.deepcompile:
        settings["compile"] = {"deepcompile": True}
    if given.leaf_blocks:
        settings["zero_optimization"]["leaf_module"] = {"classes": [BLOCK]}
    if "zenflow" in given.zero:
        settings["optimizer"] = {"type": "AdamW", "params": ADAM}
    settings["zero_optimization"] |= given.zero
    return settings


def make_model(shape: Shape, settings: dict, given: argparse.Namespace) -> GPT:
    """Born in shards at stage 3, and on the device below."""
    in_shards = settings["zero_optimization"]["stage"] == 3
    place = contextlib.nullcontext() if in_shards else DEVICE
    with place, deepspeed.zero.Init(config_dict_or_path=settings, enabled=in_shards):
        model = GPT(shape, recompute=given.recompute)
    model.compile_parts(given.compile)
    return model


def make_optimizer(model: GPT, offload: bool) -> torch.optim.Optimizer:
    if offload:
        return DeepSpeedCPUAdam(model.parameters(), adamw_mode=True, **ADAM)
    return torch.optim.AdamW(model.parameters(), fused=True, **ADAM)


def main() -> None:
    parser = torch_gpt.make_torch_parser("DeepSpeed ZeRO on a GPT")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), required=True)
    parser.add_argument("--clip_norm", type=float, default=1.0, help="0 does not clip")
    places = ("", "cpu", "nvme")
    parser.add_argument("--offload", choices=places, default="", help="optimizer state")
    parser.add_argument("--nvme_path", default="", help="directory on the disk")
    parser.add_argument("--recompute", action="store_true", help="blocks, in full")
    parser.add_argument("--deepcompile", action="store_true", help="the whole model")
    parser.add_argument("--leaf_blocks", action="store_true", help="gathered at once")
    more = "more of zero_optimization, in JSON"
    parser.add_argument("--zero", type=json.loads, default={}, help=more)
    given = parser.parse_args()
    shape = shape_of(given)
    with torch_gpt.prepared(given.attention):
        deepspeed.init_distributed()
        settings = make_settings(shape, given)
        model = make_model(shape, settings, given)
        # DeepSpeed makes the optimizers of ZenFlow itself, from its settings.
        optimizer = None
        if "optimizer" not in settings:
            optimizer = make_optimizer(model, bool(given.offload))
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings
        )
        if given.deepcompile:
            engine.compile()
        batch = torch_gpt.make_batch(shape)

        def step() -> torch.Tensor:
            for _ in range(given.num_microbatches):
                loss = engine(batch)
                engine.backward(loss)
                engine.step()
            return loss.detach()

        torch_gpt.time_and_print(given, step, packages=("torch", "deepspeed"))


if __name__ == "__main__":
    main()
