"""What dropped tokens cost: validation losses over those of runs that drop none.

Runs of a seed have equal batches, learning rates and initial weights. Kept tokens grow
over 70 % of the steps, as in the paper (arXiv:2211.11586). Each finished run is a line
of `<directory>/runs.jsonl`, and is not run again.

python examples/benchmarks/random_ltd_quality.py [--methods=plain,layerwise,span]
    [--seeds=0,1,2] [--directory=runs/random_ltd_quality] [setting=value ...]
"""

import argparse
import pathlib
import time

import call_timing
import jax
import package_text
import quality_records
import timing
from method_quality import make_run, report, train

import zjax
from zjax.compiler import use_program_cache
from zjax.data.store import digest_tokenizer

DIRECTORY = pathlib.Path("runs/random_ltd_quality")
SETTINGS = {
    "num_steps": 2000,
    "global_batch_size": 32,
    "zero": {"stage": 0},
    "data": {"source": "tokens"},
    "model": {
        "num_layers": 12,
        "embed_size": 768,
        "num_heads": 12,
        "max_length": 1024,
        "loss_chunk_tokens": 0,
    },
    "optimizer": {"peak_learning_rate": 6e-4, "num_warmup_steps": 200, "b2": 0.99},
    "evaluation": {"num_batches": 16},
}
END = 0.7
"""Share of the steps that drop tokens."""
PLAIN = "plain"
METHODS = {PLAIN: {}} | {
    form: {"random_ltd.form": form} for form in ("layerwise", "span")
}


def make_config(method, *more):
    config = zjax.load_config(SETTINGS, METHODS[method], *more)
    if method == PLAIN:
        return config
    end = max(1, round(END * config.num_steps))
    return zjax.load_config(config, {"random_ltd.pacing.num_steps": end})


def train_missing(methods, seeds, records, settings):
    for method in methods:
        known = records.read()
        missing = [seed for seed in seeds if (method, seed) not in known]
        run = make_run(make_config(method, *settings)) if missing else None
        for seed in missing:
            start = time.perf_counter()
            losses = train(run, seed)
            seconds = round(time.perf_counter() - start, 1)
            records.write(method, seed, losses=losses, seconds=seconds)
            report(f"{method}, seed {seed}: {[*losses.values()][-1]:.4f}, {seconds} s")


def compare(records, seeds):
    """Final losses over those of the plain run, seed by seed."""
    final = {key: record["losses"][-1][1] for key, record in records.read().items()}
    return {
        method: timing.spread([final[method, s] / final[PLAIN, s] for s in seeds])
        for method in METHODS
        if method != PLAIN
        and all((m, s) in final for m in (method, PLAIN) for s in seeds)
    }


def parse(words=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--directory", type=pathlib.Path, default=DIRECTORY)
    parser.add_argument("--text", type=pathlib.Path, default=DIRECTORY / "text")
    parser.add_argument("settings", nargs="*")
    given = parser.parse_args(words)
    given.methods = given.methods.split(",")
    given.seeds = [int(seed) for seed in given.seeds.split(",")]
    if unknown := set(given.methods) - METHODS.keys():
        parser.error(f"methods={min(unknown)} is unknown; use {', '.join(METHODS)}")
    return given


def main():
    given = parse()
    use_program_cache()
    package_text.prepare_text(given.text)
    settings = [f"data.path={given.text}", *given.settings]
    common = {
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "text": digest_tokenizer(str(given.text)),
    }
    setups = {
        method: common | {"settings": [SETTINGS, END, changes, *given.settings]}
        for method, changes in METHODS.items()
    }
    records = quality_records.Records(given.directory / "runs.jsonl", setups)
    train_missing(given.methods, given.seeds, records, settings)
    twins = {method: PLAIN for method in METHODS if method != PLAIN}
    quality_records.plot(records.read(), twins, given.directory / "curves.png")
    call_timing.print_result(
        compare(records, given.seeds),
        device=jax.devices()[0].device_kind,
        packages=("jax",),
    )


if __name__ == "__main__":
    main()
