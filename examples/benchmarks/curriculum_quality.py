"""Tokens that a curriculum takes to the final loss of shuffled samples.

All train the same model on Python source of this machine with one rule for the
learning rate: it stays at its peak after the warm-up, and the averaged weights are
evaluated, since a decay hides what a curriculum gains (arXiv:2511.18903). The picture
is `<directory>/curves.png`.

python examples/benchmarks/curriculum_quality.py [--seeds=3] [--text=DIR]
    [--directory=DIR] [setting=value ...]
"""

import argparse
import dataclasses
import pathlib
import statistics
import sys
import time
from typing import Any

import call_timing
import jax
import matplotlib.pyplot as plt
import numpy as np
import package_text
import quality_records
import timing

import zjax
from zjax.compiler import use_program_cache
from zjax.config.lengths import make_tokens
from zjax.data import find_evaluation, source
from zjax.data.analyze import analyze
from zjax.data.metric_index import index_path
from zjax.train.average import with_part

NUM_POINTS = 40
TEXT = pathlib.Path("runs/package_text")
DIRECTORY = pathlib.Path("runs/curriculum_quality")
BASELINE = "shuffled"
SETTINGS = {
    "num_steps": 3000,
    "global_batch_size": 64,
    "zero": {"stage": 0},
    "data": {"source": "tokens"},
    "model": {
        "num_layers": 8,
        "embed_size": 512,
        "num_heads": 8,
        "max_length": 512,
        "layers_per_scan": 1,
        "remat": "none",
        "loss_chunk_tokens": 0,
    },
    "optimizer": {
        "peak_learning_rate": 6e-4,
        "num_warmup_steps": 200,
        "schedule": "constant",
        "ema_decay": 0.99,
    },
    "evaluation": {"num_batches": 16},
}
SHARE = 0.4
"""Of the steps until all samples are drawn, as in the paper."""
METRICS = ("voc", "compression")
SHORT_FIRST = {"sequence_warmup.form": "truncate"}
METHODS = {
    BASELINE: ((), {}),
    "voc": (("voc",), {}),
    "compression": (("compression",), {}),
    "seqtru": ((), SHORT_FIRST),
    "seqtru_voc": (("voc",), SHORT_FIRST),
    "seqres": ((), {"sequence_warmup.form": "reshape"}),
}


def make_config(method, output, *more):
    """The config of a method; its last step of ease follows the number of steps."""
    names, changes = METHODS[method]
    config = zjax.load_config(SETTINGS, changes, *more)
    num_steps = round(SHARE * config.num_steps)
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
        digest=source.digest_samples(config, rows),
    )


def train(run, seed):
    """Validation losses by tokens consumed."""
    config = dataclasses.replace(run.config, seed=seed)
    tx = zjax.make_optimizer(config, run.model)
    state = zjax.init_state(jax.random.key(seed), run.model, tx, run.plan, config)
    held_out = find_evaluation(config, run.batch_placement)
    every, consumed = max(1, config.num_steps // NUM_POINTS), make_tokens(config)
    losses = {}
    with zjax.make_loader(
        config, run.batch_placement, num_batches=config.num_steps
    ) as batches:
        for step, batch in enumerate(batches, start=1):
            state, _ = run.step(state, batch)
            if step % every == 0 or step == config.num_steps:
                averaged = with_part(state, "ema")
                found = held_out.mean(
                    lambda batch, at=averaged: run.evaluate(at, batch)
                )
                losses[consumed.sum_until(step)] = found["eval_loss"]
    return losses


def tokens_to(loss, losses):
    """Tokens at which losses first reach one, interpolated; None if they never do.

    A loss that is not a number is never reached, and reaches nothing.
    """
    before = None
    for tokens, value in losses.items():
        if value <= loss:
            if before is None or not before[1] > value:
                return tokens
            share = (before[1] - loss) / (before[1] - value)
            return before[0] + share * (tokens - before[0])
        before = tokens, value
    return None


def measure(num_seeds, text, directory, overrides):
    package_text.prepare_text(text)
    path = f"data.path={text}"
    measure_metrics(make_config(BASELINE, directory, path, *overrides), directory)
    losses = {method: [] for method in METHODS}
    for method in METHODS:
        config = make_config(method, directory, path, *overrides)
        model = zjax.make_model(config)
        run = zjax.make_run(config, model, zjax.make_optimizer(config, model))
        for seed in range(num_seeds):
            start = time.perf_counter()
            losses[method].append(train(run, seed))
            final = [*losses[method][-1].values()][-1]
            seconds = time.perf_counter() - start
            told = f"{method}, seed {seed}: {final:.4f} after {seconds:.0f} s"
            print(told, file=sys.stderr, flush=True)
    plot(losses, directory / "curves.png")
    shares = {method: shares_of(losses, method) for method in METHODS}
    reached = {
        method: [*filter(None, found)]
        for method, found in shares.items()
        if None not in found
    }
    reached.pop(BASELINE, None)
    if not reached:
        raise SystemExit(f"no curriculum reaches the loss of the others: {shares}")
    best = min(reached, key=lambda method: statistics.median(reached[method]))
    return {
        "tokens_over_shuffled": timing.spread(reached[best]),
        "best": best,
        "shares": shares,
        "final_losses": {
            method: [[*run.values()][-1] for run in found]
            for method, found in losses.items()
        },
    }


def shares_of(losses, method):
    """Tokens to the final loss of shuffled samples over theirs, seed by seed."""
    return [
        share_of(own, shuffled)
        for own, shuffled in zip(losses[method], losses[BASELINE], strict=True)
    ]


def share_of(own, other):
    """Where a curve first reaches the final loss of another, over where that does.

    Both by `tokens_to`: the other may have been there before its end. None if one of
    them never is, as where the final loss is not a number.
    """
    final = [*other.values()][-1]
    found, needed = tokens_to(final, own), tokens_to(final, other)
    return None if found is None or needed is None else found / needed


def plot(losses, path):
    """Draws mean losses by tokens, and their range over the seeds."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for method, found in losses.items():
        style = {"color": "black"} if method == BASELINE else {}
        curves = np.array([[*run.items()] for run in found], float)
        quality_records.draw(axes, method, curves, **style)
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss on held-out text (nats per token)")
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--text", type=pathlib.Path, default=TEXT)
    parser.add_argument("--directory", type=pathlib.Path, default=DIRECTORY)
    parser.add_argument("settings", nargs="*")
    given = parser.parse_args()
    use_program_cache()
    found = measure(given.seeds, given.text, given.directory, given.settings)
    device = jax.devices()[0].device_kind
    call_timing.print_result(found, device=device, packages=("jax",))


if __name__ == "__main__":
    main()
