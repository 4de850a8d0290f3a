"""What distillation closes of the loss gap between a pruned model and the larger one.

Runs start from parts of the model of `compress_start.py`, chosen by importance. A plain
run and a run with the larger model as teacher see the same further tokens.
Each finished run is a line of `<directory>/runs.jsonl`, and is not run again.

python examples/benchmarks/prune_quality.py [--directory=runs/layer_reduction]
    [--seeds=0,1,2] [--text=runs/compress_start/text] [setting=value ...]
"""

import pathlib
import sys

import call_timing
import compress_start
import jax
import qat_quality
import quality_records

import zjax
from zjax.data.store import digest_tokenizer
from zjax.run.compiler import use_program_cache

DIRECTORY = pathlib.Path("runs/layer_reduction")
FURTHER = {
    "num_steps": 400,
    "optimizer": {"schedule": {"num_warmup_steps": 40}, "peak_learning_rate": 3e-4},
    "evaluation": {"every_steps": 0},
    "prune": {"num_rows": 64},
}
FULL = "full"
TEACHING = {"fraction": 1.0, "hidden": {"fraction": 0.6}}


def shapes_of(model):
    """Changes of a model that halve the depth, or heads and hidden channels."""
    heads = model.num_heads // 2
    narrow = {"num_heads": heads, "num_kv_heads": heads, "head_size": model.head_size}
    return {
        "depth": {"num_layers": model.num_layers // 2},
        "width": narrow | {"mlp_size": model.mlp_size // 2},
    }


def loss_of(config):
    """Trains a run; returns seconds and the loss on the held-out files."""
    run, state, seconds = qat_quality.train(config)
    return {"seconds": seconds, "loss": qat_quality.held_out_loss(run, state)}


def loss_of_start(config):
    """Loss of the larger model on the held-out files."""
    model = zjax.make_model(config)
    run = zjax.make_run(config, model, zjax.make_optimizer(config, model))
    return {"loss": qat_quality.held_out_loss(run, run.state)}


def gap_ratio(full, plain, taught):
    """Gap to the larger model with distillation over the gap without."""
    return (taught["loss"] - full["loss"]) / (plain["loss"] - full["loss"])


def main(words=None):
    given = qat_quality.parse(words, __doc__, DIRECTORY)
    use_program_cache()
    start = compress_start.train_start(given.start, given.text, *given.settings)
    paths = {"data.path": str(given.text), "checkpoint.init_from": str(start)}
    large = zjax.load_config(compress_start.SETTINGS, *given.settings)
    shapes = shapes_of(large.model)
    setup = {
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "text": digest_tokenizer(str(given.text)),
        "settings": [compress_start.SETTINGS, FURTHER, shapes, TEACHING],
        "more": given.settings,
    }
    kinds = {"plain": {}, "taught": {"distill": TEACHING | {"teacher": str(start)}}}
    names = [FULL, *(f"{shape}, {kind}" for shape in shapes for kind in kinds)]
    records = quality_records.Records(
        given.directory / "runs.jsonl", dict.fromkeys(names, setup)
    )

    def run_missing(name, make):
        known = records.read()
        for seed in given.seeds:
            if (name, seed) not in known:
                found = make(seed)
                records.write(name, seed, **found)
                print(f"{name}, seed {seed}: {found}", file=sys.stderr, flush=True)
        known = records.read()
        return [known[name, seed] for seed in given.seeds]

    def student(shape, kind, seed):
        own = {"directory": str(given.directory / f"{shape}-{kind}-{seed}")}
        return zjax.load_config(
            compress_start.SETTINGS,
            FURTHER,
            *given.settings,
            {"model": shapes[shape]},
            kinds[kind],
            paths,
            own | {"seed": seed},
        )

    whole = zjax.load_config(compress_start.SETTINGS, *given.settings, paths)
    full, result = run_missing(FULL, lambda seed: loss_of_start(whole)), {}
    for shape in shapes:
        plain, taught = (
            run_missing(
                f"{shape}, {kind}",
                lambda seed, how=(shape, kind): loss_of(student(*how, seed)),
            )
            for kind in kinds
        )
        ratios = map(gap_ratio, full, plain, taught)
        result[f"{shape}_gap_ratio"] = max(ratios)
        gaps = [x["loss"] - y["loss"] for x, y in zip(plain, full, strict=True)]
        result[f"{shape}_gap"] = min(gaps)
    call_timing.print_result(
        result | {"num_devices": jax.device_count()},
        device=jax.devices()[0].device_kind,
        packages=("jax",),
    )


if __name__ == "__main__":
    main()
