"""DeepSpeed ZeRO on a GPT.

python -m torch.distributed.run --nproc_per_node=2 examples/benchmarks/deepspeed_peer.py
    --num_layers=48 --embed_size=1600 --num_heads=25 --vocab_size=50304 --length=1024
    --microbatch_size=16 --stage=2
"""

import contextlib

import deepspeed
import torch
import torch_gpt
from shape import Shape, shape_of
from torch_gpt import DEVICE, GPT

BUCKET_ELEMENTS = 200_000_000


def make_settings(shape: Shape, stage: int, num_microbatches: int) -> dict:
    return {
        "train_micro_batch_size_per_gpu": shape.microbatch_size,
        "gradient_accumulation_steps": num_microbatches,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "allgather_bucket_size": BUCKET_ELEMENTS,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


def make_model(shape: Shape, settings: dict, compile_parts: str) -> GPT:
    """Born in shards at stage 3, and on the device below."""
    in_shards = settings["zero_optimization"]["stage"] == 3
    place = contextlib.nullcontext() if in_shards else DEVICE
    with place, deepspeed.zero.Init(config_dict_or_path=settings, enabled=in_shards):
        model = GPT(shape)
    model.compile_parts(compile_parts)
    return model


def main() -> None:
    parser = torch_gpt.make_torch_parser("DeepSpeed ZeRO on a GPT")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), required=True)
    given = parser.parse_args()
    shape = shape_of(given)
    with torch_gpt.prepared(given.attention):
        deepspeed.init_distributed()
        settings = make_settings(shape, given.stage, given.num_microbatches)
        model = make_model(shape, settings, given.compile)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings
        )
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
