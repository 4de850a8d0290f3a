"""DeepSpeed's random-LTD: steps that drop tokens over its own steps of all tokens.

The sizes of subsets and their weights are those of `dropping_steps.py`. Blocks compile
for each size.

python -m torch.distributed.run --nproc_per_node=1
    examples/benchmarks/random_ltd_deepspeed.py --num_layers=24 --embed_size=1024
    --num_heads=16 --vocab_size=50304 --length=2048 --microbatch_size=8
    --compile=blocks_and_loss
"""

import statistics
import time

import call_timing
import deepspeed
import timing
import torch
import torch_gpt
from deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd
from kept_schedule import kept_tokens, mean_of_run
from shape import Shape, shape_of

ROUNDS, STEPS_PER_ROUND = 5, 8
ADAM = {"lr": 1e-4, "weight_decay": 0.1, "betas": (0.9, 0.95)}


def make_settings(shape: Shape) -> dict:
    layers = list(range(1, shape.num_layers - 1))
    random_ltd = {
        "enabled": True,
        "total_layer_num": shape.num_layers,
        "random_ltd_layer_num": len(layers),
        "random_ltd_layer_id": layers,
        "model_mask_name": None,
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": {
            "min_value": shape.length,
            "max_value": shape.length,
            "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": 10**9, "seq_per_step": 1},
        },
        "layer_token_lr_schedule": {"enabled": False},
    }
    return {
        "train_micro_batch_size_per_gpu": shape.microbatch_size,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "data_efficiency": {
            "enabled": True,
            "data_routing": {"enabled": True, "random_ltd": random_ltd},
        },
    }


def keep(engine, num_tokens: int) -> None:
    """Sets the size of the subsets; the schedule starts and stays there."""
    scheduler = engine.random_ltd_scheduler
    scheduler.state["min_value"] = num_tokens
    scheduler.set_current_seq(num_tokens)


def time_steps(engine, batch, number: int) -> float:
    """Seconds per step."""
    start = time.perf_counter()
    for _ in range(number):
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
    torch_gpt.settle(loss.detach())
    return (time.perf_counter() - start) / number


def main() -> None:
    parser = torch_gpt.make_torch_parser("DeepSpeed's random-LTD")
    given = parser.parse_args()
    shape = shape_of(given)
    # One program per size: symbolic sizes are slower.
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.recompile_limit = 64
    with torch_gpt.prepared(given.attention):
        deepspeed.init_distributed()
        with torch_gpt.DEVICE:
            model = torch_gpt.GPT(shape)
        model.compile_parts(given.compile)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAM)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=make_settings(shape)
        )
        engine = convert_to_random_ltd(engine, torch_gpt.Block)
        batch = torch_gpt.make_batch(shape)
        sizes = kept_tokens(shape.length)
        rounds = []
        for number in (1, *[STEPS_PER_ROUND] * ROUNDS):
            seconds = {}
            for size in (shape.length, *sizes):
                keep(engine, size)
                seconds[size] = time_steps(engine, batch, number)
            rounds.append(seconds)
    rounds = rounds[1:]  # the first one compiles
    ratios = [
        mean_of_run([each[n] for n in sizes], each[shape.length]) for each in rounds
    ]
    medians = {n: statistics.median(each[n] for each in rounds) for n in rounds[0]}
    call_timing.print_result(
        {
            "layerwise": timing.spread(ratios),
            "layerwise_speed": timing.spread([1 / ratio for ratio in ratios]),
            "step_seconds": medians,
        },
        device=torch.cuda.get_device_name() if torch_gpt.IS_CUDA else "cpu",
        packages=("torch", "deepspeed"),
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
