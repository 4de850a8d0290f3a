"""What training on rounded matrices recovers of the loss of rounding to nearest.

Runs start from `compress_start.py`. A plain run and a run on rounded matrices see the
same further tokens, in full and by LoRA; the plain runs are rounded to nearest behind.
Each finished run is a line of `<directory>/runs.jsonl`, and is not run again.

python examples/benchmarks/qat_quality.py [--directory=runs/qat_recovery]
    [--seeds=0,1,2] [--text=runs/compress_start/text] [setting=value ...]
"""

import argparse
import dataclasses
import pathlib
import sys
import time

import call_timing
import compress_start
import jax
import jax.numpy as jnp
import quality_records

import zjax
from zjax.data import find_evaluation
from zjax.data.store import digest_tokenizer
from zjax.run.compiler import use_program_cache
from zjax.weights.adapters import merged_kernel

DIRECTORY = pathlib.Path("runs/qat_recovery")
FURTHER = {
    "num_steps": 400,
    "optimizer": {"schedule": {"num_warmup_steps": 40}, "peak_learning_rate": 1e-4},
    "evaluation": {"every_steps": 0},
}
LORA = {
    "lora": {"rank": 64, "alpha": 64.0},
    "optimizer": {"peak_learning_rate": 1e-3},
}
HOW = {"full": {}, "lora": LORA}
WEIGHTS = ("int4", "int3")
GROUP = 128
LEAST_GAP = 0.01
"""Nats that rounding to nearest must lose, for the first type that loses so much."""


def rules(weights):
    return {"quantize": {"rules": [{"weights": weights, "group_size": GROUP}]}}


def parse(words=None, description=__doc__, directory=DIRECTORY):
    """Arguments of a program that trains runs on from the start."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--directory", type=pathlib.Path, default=directory)
    parser.add_argument("--start", type=pathlib.Path, default=compress_start.DIRECTORY)
    parser.add_argument(
        "--text", type=pathlib.Path, default=compress_start.DIRECTORY / "text"
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("settings", nargs="*", help="settings of all runs")
    given = parser.parse_args(words)
    given.seeds = [int(seed) for seed in given.seeds.split(",")]
    return given


def train(config):
    """Trains a run from the start; returns the run, the state and the seconds."""
    model = zjax.make_model(config)
    run = zjax.make_run(config, model, zjax.make_optimizer(config, model))
    state, start = run.state, time.perf_counter()
    with zjax.make_loader(
        config, run.batch_placement, num_batches=config.num_steps
    ) as batches:
        for batch in batches:
            state, _ = run.step(state, batch)
    jax.block_until_ready(state.step)
    return run, state, round(time.perf_counter() - start, 1)


def held_out_loss(run, state):
    """Loss on the held-out files, with the matrices that the run's model reads."""
    held_out = find_evaluation(run.config, run.batch_placement)
    return held_out.mean(lambda batch: run.evaluate(state, batch))["eval_loss"]


def loss_of_params(params, config):
    """Loss on the held-out files of the weights under a model of other settings."""
    model = zjax.make_model(config)
    run = zjax.make_run(config, model, zjax.make_optimizer(config, model))
    placed = jax.tree.map(
        lambda x, old: jax.device_put(jnp.asarray(x, old.dtype), old.sharding),
        params,
        run.state.master,
    )
    return held_out_loss(run, dataclasses.replace(run.state, master=placed))


def merged(params, settings):
    """Parameters without adapters: matrices are merged in float32."""

    def merge(tree):
        if not isinstance(tree, dict):
            return tree
        if "lora" not in tree:
            return {name: merge(x) for name, x in tree.items()}
        own = tree["lora"]
        layers = [
            merged_kernel(kernel, {"a": a, "b": b}, settings)
            for kernel, a, b in zip(tree["kernel"], own["a"], own["b"], strict=True)
        ]
        others = {n: x for n, x in tree.items() if n not in ("kernel", "lora")}
        return others | {"kernel": jnp.stack(layers)}

    return merge(jax.device_get(params))


def run_plain(how, config, weights):
    """Trains without rounding; losses as trained and rounded to nearest."""
    run, state, seconds = train(config)
    found = {"seconds": seconds, "plain": held_out_loss(run, state)}
    params, whole = state.master, dataclasses.replace(config, lora=None)
    if how == "lora":
        params = merged(params, config.lora)
    for kind in weights:
        found[kind] = loss_of_params(params, zjax.load_config(whole, rules(kind)))
    return found


def run_rounded(config):
    """Trains on rounded matrices; the loss that the rounded model has."""
    run, state, seconds = train(config)
    return {"seconds": seconds, "rounded": held_out_loss(run, state)}


def choose_weights(plain):
    """Returns the first type of codes whose gap is wide enough in all runs."""
    for kind in WEIGHTS:
        if all(run[kind] - run["plain"] >= LEAST_GAP for run in plain):
            return kind
    raise SystemExit(f"rounding to {WEIGHTS[-1]} loses less than {LEAST_GAP} nats")


def recovered(plain, rounded, kind):
    """Share of the gap that training on rounded matrices closes."""
    return (plain[kind] - rounded["rounded"]) / (plain[kind] - plain["plain"])


def main(words=None):
    given = parse(words)
    use_program_cache()
    start = compress_start.train_start(given.start, given.text, *given.settings)
    paths = {"data.path": str(given.text), "checkpoint.init_from": str(start)}
    base = [compress_start.SETTINGS, *given.settings, FURTHER]
    setup = {
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "text": digest_tokenizer(str(given.text)),
        "settings": [*base, HOW, *given.settings],
    }
    names = [f"{how}, {x}" for how in HOW for x in ("plain", *WEIGHTS)]
    setups = dict.fromkeys(names, setup)
    records = quality_records.Records(given.directory / "runs.jsonl", setups)

    def config_of(how, seed, more):
        return zjax.load_config(
            *base, HOW[how], *given.settings, more, paths, {"seed": seed}
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

    result = {}
    for how in HOW:
        plain = run_missing(
            f"{how}, plain",
            lambda seed, how=how: run_plain(how, config_of(how, seed, {}), WEIGHTS),
        )
        kind = choose_weights(plain)
        rounded = run_missing(
            f"{how}, {kind}",
            lambda seed, how=how, kind=kind: run_rounded(
                config_of(how, seed, rules(kind))
            ),
        )
        pairs = list(zip(plain, rounded, strict=True))
        result[f"{how}_recovered"] = min(recovered(*pair, kind) for pair in pairs)
        result[f"{how}_gap"] = min(run[kind] - run["plain"] for run in plain)
        result[f"{how}_weights"] = kind
    call_timing.print_result(
        result | {"num_devices": jax.device_count()},
        device=jax.devices()[0].device_kind,
        packages=("jax",),
    )


if __name__ == "__main__":
    main()
