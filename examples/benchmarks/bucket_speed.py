"""Tokens per second of length buckets and of rows that cut and join documents.

Both train the same model on the same text, Python source of this machine, with equally
many tokens per step. Each round is a number of steps in a row, as in training.

python examples/benchmarks/bucket_speed.py [--steps=48] [--text=DIR] [setting=value ...]
"""

import argparse
import pathlib
import statistics
import sys
import time

import call_timing
import jax
import package_text
import timing

import zjax
from zjax.run.compiler import use_program_cache
from zjax.schedule.buckets import bucket_lengths

ROUNDS = 5
TEXT = pathlib.Path("runs/package_text_64k")
MAX_FILE_BYTES = 1 << 16
"""Longer files are left out: half of the tokens of all are in files above 8,192."""
SETTINGS = {
    "global_batch_size": 8,
    "zero": {"stage": 0},
    "data": {"source": "tokens"},
    "model": {
        "num_layers": 12,
        "embed_size": 768,
        "num_heads": 12,
        "max_length": 8_192,
        "positions": "rotary",
    },
    "optimizer": {"schedule": {"num_warmup_steps": 20}},
    "evaluation": {"num_batches": 0},
    "buckets": {"kind": "cut", "shortest": 256},
}
WAYS = {"joined": {"buckets": None}, "buckets": {}}


def make_run(config):
    model = zjax.make_model(config)
    return zjax.make_run(config, model, zjax.make_optimizer(config, model))


def time_rounds(config, num_steps):
    """Tokens per second of each round, once all lengths are compiled."""
    run = make_run(config)
    state, speeds = run.state, []
    with zjax.make_loader(config, run.batch_placement) as batches:
        state = warm_up(run, state, batches)
        for _ in range(ROUNDS):
            start, num_tokens = time.perf_counter(), 0
            for _ in range(num_steps):
                batch = next(batches)
                num_tokens += batch["tokens"].size
                state, metrics = run.step(state, batch)
            jax.block_until_ready((state, metrics))
            speeds.append(num_tokens / (time.perf_counter() - start))
    return speeds


def warm_up(run, state, batches):
    """Takes steps until each length has had one, and some more."""
    wanted = 1
    if buckets := run.config.buckets:
        wanted = len(bucket_lengths(buckets.shortest, run.config.data.length))
    seen = set()
    while len(seen) < wanted:
        batch = next(batches)
        seen.add(batch["tokens"].shape)
        state, _ = run.step(state, batch)
    return jax.block_until_ready(state)


def measure(num_steps, text, overrides):
    package_text.prepare_text(text, max_file_bytes=MAX_FILE_BYTES)
    speeds = {}
    for way, changes in WAYS.items():
        settings = {"data.path": str(text)}
        # Last, as None drops the settings of buckets among the overrides.
        config = zjax.load_config(SETTINGS, settings, *overrides, changes)
        speeds[way] = time_rounds(config, num_steps)
        median = statistics.median(speeds[way])
        print(f"{way}: {median:,.0f} tokens/s", file=sys.stderr, flush=True)
    pairs = zip(speeds["buckets"], speeds["joined"], strict=True)
    return {
        "buckets_over_joined": timing.spread([x / y for x, y in pairs]),
        "tokens_per_second": {way: timing.spread(x) for way, x in speeds.items()},
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--text", type=pathlib.Path, default=TEXT)
    parser.add_argument("settings", nargs="*")
    given = parser.parse_args()
    use_program_cache()
    found = measure(given.steps, given.text, given.settings)
    device = jax.devices()[0].device_kind
    call_timing.print_result(found, device=device, packages=("jax",))


if __name__ == "__main__":
    main()
