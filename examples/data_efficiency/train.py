"""A GPT whose context grows and that sees easy samples first, beside plain training.

Four runs of one model on the source of Python's standard library: plain, truncated
sequences first, a growing attention window, and the window with a curriculum of
samples that compress well. Their learning rates are equal.
"""

import argparse
import pathlib
import tempfile
import time

import jax
import matplotlib.pyplot as plt

import zjax
from zjax.data import source
from zjax.data.analyze import analyze
from zjax.data.metric_index import index_path
from zjax.schedule.lengths import make_tokens

MODEL = {"num_layers": 2, "embed_size": 64, "num_heads": 2, "max_length": 256}


def settings_of(num_steps, index):
    """Settings by the name of a run; schedules end after 60 % of the steps."""
    pacing = {"start": 32, "multiple": 32, "num_steps": max(1, round(0.6 * num_steps))}
    window = {"sequence_warmup": {"kind": "window", "pacing": pacing}}
    difficulty = {"kind": "root", "start": 20, "num_steps": pacing["num_steps"]}
    metric = {"index": str(index), "pacing": difficulty}
    return {
        "plain": {},
        "truncate": {"sequence_warmup": {"kind": "truncate", "pacing": pacing}},
        "window": window,
        "window and curriculum": window | {"curriculum": {"metrics": (metric,)}},
    }


def measure_samples(config, folder):
    """Writes the index of how well each sample compresses."""
    rows = source.open_rows(config, "train")
    size = source.make_tokenizer(config).vocab_size
    digest = source.digest_samples(config.data, rows)
    analyze(rows, folder, ["compression"], vocab_size=size, digest=digest)
    return index_path(folder, "compression")


def train(name, config):
    """Tokens, seconds and losses at each tenth of the run."""
    model = zjax.make_model(config)
    run = zjax.make_run(config, model, zjax.make_optimizer(config, model))
    state, tokens = run.state, make_tokens(run.config)
    every, points = max(1, config.num_steps // 10), []
    start = time.perf_counter()
    with zjax.make_loader(
        run.config, run.batch_placement, num_batches=config.num_steps
    ) as batches:
        for step, batch in enumerate(batches):
            state, metrics = run.step(state, batch)
            if step % every == 0 or step == config.num_steps - 1:
                loss, seconds = float(metrics["loss"]), time.perf_counter() - start
                points.append((tokens.sum_until(step + 1), seconds, loss))
    print(f"step 0: {points[0][-1]:.3f}, step {step}: {points[-1][-1]:.3f} ({name})")
    return points


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    num_steps = parser.parse_args().steps
    jax.config.update("jax_num_cpu_devices", 8)  # no effect on a machine with GPUs
    config = zjax.load_config(
        {
            "num_steps": num_steps,
            "global_batch_size": 16,
            "model": MODEL,
            "optimizer": {
                "schedule": {"num_warmup_steps": 1},
                "peak_learning_rate": 0.002,
            },
        }
    )
    figure, panels = plt.subplots(
        1, 2, figsize=(9, 4), sharey=True, layout="constrained"
    )
    with tempfile.TemporaryDirectory() as folder:
        index = measure_samples(config, pathlib.Path(folder))
        for name, settings in settings_of(num_steps, index).items():
            points = train(name, zjax.load_config(config, settings))
            tokens, seconds, losses = zip(*points, strict=True)
            panels[0].plot(tokens, losses, label=name)
            panels[1].plot(seconds, losses)
    panels[0].set(xlabel="tokens", ylabel="loss of the batch (nats per byte)")
    panels[1].set_xlabel("seconds, with compilation")
    panels[0].legend(frameon=False)
    figure.savefig("data_efficiency.png", dpi=100)
    print("picture: data_efficiency.png")


if __name__ == "__main__":
    main()
