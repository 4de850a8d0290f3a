"""A language model small enough to train in a test, from Python or as a program.

As a program, on 8 simulated devices:
`python -m tests.support.small_run DIRECTORY NUM_STEPS [setting=value ...]`
"""

import contextlib
import io
import json
import pathlib
import sys

import jax
import numpy as np

from zjax.config import load_config
from zjax.run.trainer import Trainer

SETTINGS = {
    "num_steps": 8,
    "global_batch_size": 16,
    "zero": {"stage": 2, "min_shard_elements": 64},
    "precision": {"compute_dtype": "float32"},
    "optimizer": {"num_warmup_steps": 2, "peak_learning_rate": 1e-2},
    "model": {
        "num_layers": 1,
        "embed_size": 16,
        "mlp_size": 32,
        "num_heads": 2,
        "num_kv_heads": 2,
        "vocab_size": 61,
        "max_length": 16,
        "dropout_rate": 0.1,
    },
    "data": {"source": "synthetic", "length": 16},
    "evaluation": {"every_steps": 0, "num_batches": 0},
    "checkpoint": {"every_steps": 0},
    "observe": {"sinks": ("jsonl",), "log_every_steps": 1, "plot": False},
}

EVALUATED = "evaluation.num_batches=1"
"""Setting of the runs that a test evaluates, which compile one more program."""


def make_config(directory, *overrides):
    return load_config(SETTINGS, {"directory": str(directory)}, *overrides)


def make_trainer(directory, *overrides, num_devices=8, **given):
    config = make_config(directory, *overrides)
    return Trainer(config, devices=jax.devices()[:num_devices], **given)


def fit(directory, *overrides, **given):
    trainer = make_trainer(directory, *overrides, **given)
    trainer.fit()
    trainer.close()
    return trainer


def told(directory, *overrides, **given):
    """A run to its end, its directory, and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        trainer = fit(directory, *overrides, **given)
    return trainer, directory, out.getvalue()


def stop(directory, *overrides, steps=3, **given):
    """Saves a run after its first steps."""
    trainer = make_trainer(directory, *overrides, **given)
    with trainer.loader as batches:
        for _ in range(steps):
            trainer.state, _ = trainer.run.step(trainer.state, next(batches))
        trainer.save()
    trainer.close()


def records(directory):
    """The metrics of each training step, as the run wrote them."""
    lines = (pathlib.Path(directory) / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


def losses(directory):
    return {row["step"]: row["loss"] for row in records(directory)}


def arrays(trainer):
    return jax.tree.map(np.asarray, trainer.state.master)


def assert_equal(trainer, other):
    """Bit for bit the same weights."""
    jax.tree.map(np.testing.assert_array_equal, arrays(trainer), arrays(other))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    fit(sys.argv[1], f"num_steps={sys.argv[2]}", *sys.argv[3:])
