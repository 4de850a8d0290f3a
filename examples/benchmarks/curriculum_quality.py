"""Tokens that a curriculum takes to the final loss of shuffled samples.

All train the same model on Python source of this machine with one rule for the
learning rate: it stays at its peak after the warm-up, and the averaged weights are
evaluated, since a decay hides what a curriculum gains (arXiv:2511.18903). Each finished
run is a line of `<directory>/runs.jsonl`, and is not run again; the picture is
`<directory>/curves.png`.

python examples/benchmarks/curriculum_quality.py [--methods=shuffled,voc]
    [--seeds=0,1,2] [--text=DIR] [--directory=DIR] [setting=value ...]
"""

import pathlib
import statistics
from typing import Any

import call_timing
import jax
import matplotlib.pyplot as plt
import numpy as np
import package_text
import quality_records
import timing
from quality_training import SMALL_GPT, Method, make_run, train_missing

import zjax
from zjax.data import source
from zjax.data.analyze import analyze
from zjax.data.metric_index import index_path
from zjax.data.store import digest_tokenizer
from zjax.run.compiler import use_program_cache

NUM_POINTS = 30
TEXT = pathlib.Path("runs/package_text")
DIRECTORY = pathlib.Path("runs/curriculum_quality")
BASELINE = "shuffled"
SETTINGS = {
    "num_steps": 1000,
    "global_batch_size": 128,
    "zero": {"stage": 0},
    "data": {"source": "tokens"},
    "model": SMALL_GPT | {"max_length": 512, "loss_chunk_tokens": 0},
    "optimizer": {
        "schedule": {"kind": "constant", "num_warmup_steps": 200},
        "peak_learning_rate": 0.0006,
        "ema_decay": 0.99,
    },
    "evaluation": {"num_batches": 16},
}
SHARE = 0.5
"""Of the shuffled run's steps until all samples are drawn whole."""
MORE = 1.2
"""Steps of runs whose first samples are short, over those of the shuffled run."""
METRICS = ("voc", "compression")
SHORT_FIRST = {"sequence_warmup": "truncate"}
METHODS = {
    BASELINE: ((), {}),
    "voc": (("voc",), {}),
    "compression": (("compression",), {}),
    "seqtru": ((), SHORT_FIRST),
    "seqtru_voc": (("voc",), SHORT_FIRST),
    "seqres": ((), {"sequence_warmup": "reshape"}),
}


def make_config(method, output, *more):
    """The config of a method; its last step of ease follows the number of steps."""
    names, changes = METHODS[method]
    config = zjax.load_config(SETTINGS, changes, *more)
    num_steps = round(SHARE * config.num_steps)
    if changes:
        config = zjax.load_config(config, f"num_steps={round(MORE * config.num_steps)}")
    metrics = tuple(
        {
            "index": str(index_path(output, name)),
            "pacing": {"kind": "root", "start": 5, "num_steps": num_steps},
        }
        for name in names
    )
    chosen: dict[str, Any] = {"curriculum.metrics": metrics}
    if changes:
        chosen["sequence_warmup.pacing.num_steps"] = num_steps
    return zjax.load_config(config, chosen)


def measure_metrics(config, output):
    """Writes the indexes of the metrics, unless they are there."""
    rows = source.open_rows(config, "train")
    analyze(
        rows,
        output,
        list(METRICS),
        vocab_size=source.make_tokenizer(config).vocab_size,
        digest=source.digest_samples(config.data, rows),
    )


def compare(records, seeds):
    """Tokens to the loss of shuffled samples, by the methods that there are."""
    shuffled = records.read_all(BASELINE, seeds)
    curves = {name: records.read_all(name, seeds) for name in METHODS}
    if not shuffled:
        return {}
    shares = {
        name: quality_records.shares(runs, shuffled, by="tokens")
        for name, runs in curves.items()
        if runs and name != BASELINE
    }
    found = {"shares": shares}
    reached = {name: each for name, each in shares.items() if None not in each}
    if shares and not reached:
        raise SystemExit(f"no curriculum reaches the loss of the others: {shares}")
    if reached:
        best = min(reached, key=lambda name: statistics.median(reached[name]))
        found |= {"best": best, "tokens_over_shuffled": timing.spread(reached[best])}
    return found


def plot(records, path):
    """Draws mean losses by tokens, and their range over the seeds."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for method in METHODS:
        runs = [run for (name, _), run in sorted(records.items()) if name == method]
        if runs:
            style = {"color": "black"} if method == BASELINE else {}
            curves = [[*quality_records.curve(run, "tokens").items()] for run in runs]
            quality_records.draw(axes, method, np.array(curves, float), **style)
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss on held-out text (nats per token)")
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main():
    given = quality_records.parse(__doc__, METHODS, DIRECTORY, TEXT)
    use_program_cache()
    package_text.prepare_text(given.text)
    settings = [f"data.path={given.text}", *given.settings]
    if not all(index_path(given.directory, name).exists() for name in METRICS):
        measure_metrics(
            make_config(BASELINE, given.directory, *settings), given.directory
        )
    device = jax.devices()[0].device_kind
    common = [device, digest_tokenizer(str(given.text)), SETTINGS, SHARE, MORE]
    setups = {
        name: [list(metrics), changes, *common, *given.settings]
        for name, (metrics, changes) in METHODS.items()
    }
    records = quality_records.Records(given.directory / "runs.jsonl", setups)

    def make_method(name):
        config = make_config(name, given.directory, *settings)
        return Method(make_run(config), NUM_POINTS, part="ema")

    train_missing(given.methods, given.seeds, records, make_method)
    plot(records.read(), given.directory / "curves.png")
    found = compare(records, given.seeds)
    call_timing.print_result(found, device=device, packages=("jax",))


if __name__ == "__main__":
    main()
