"""The programs and contests of `examples/benchmarks`, as a test takes them."""

import importlib.util
import pathlib

from zjax.config import load_config

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "benchmarks"
TINY = (
    "num_steps=3",
    "global_batch_size=8",
    "model.num_layers=1",
    "model.embed_size=32",
    "model.num_heads=2",
    "model.max_length=32",
    "data.length=32",
    "evaluation.num_batches=1",
    "optimizer.schedule.num_warmup_steps=0",
)
"""Settings of a run of a decoder on tokens that takes a CPU seconds."""


def load(name):
    """A program as a module."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def options(words):
    return dict(word.partition("=")[::2] for word in words if word.startswith("--"))


def config_of(contestant, *more, num_devices=8):
    """The settings of a contestant that is zjax, whatever starts it."""
    words = contestant.words("python", num_devices)
    if "zjax.cli.main" in words:
        given = options(words)
        path = given.pop("--config")
        changes = [f"{key.removeprefix('--config.')}={x}" for key, x in given.items()]
    else:
        path, *changes = [word for word in words[2:] if not word.startswith("--")]
    return load_config(ROOT / path, *changes, *more)
