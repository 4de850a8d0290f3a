"""A GPT of 124M parameters to round, trained once on source text of this machine.

Programs that measure what rounding loses start from the same weights: `train_start`
trains them if they are not there, and goes on with a run that was killed.

python examples/benchmarks/compress_start.py [--directory=runs/compress_start]
    [--text=runs/compress_start/text] [setting=value ...]
"""

import argparse
import pathlib

import package_text

import zjax
from zjax.run.compiler import use_program_cache

DIRECTORY = pathlib.Path("runs/compress_start")
SETTINGS = {
    "num_steps": 2400,
    "global_batch_size": 64,
    "zero": {"stage": 0},
    "data": {"source": "tokens"},
    "model": {
        "num_layers": 17,
        "embed_size": 768,
        "num_heads": 12,
        "max_length": 512,
        "layers_per_scan": 1,
        "remat": "none",
    },
    "optimizer": {
        "rule": {"b2": 0.99},
        "schedule": {"num_warmup_steps": 200},
        "peak_learning_rate": 0.0006,
    },
    "evaluation": {"every_steps": 800, "num_batches": 16},
    "checkpoint": {"every_steps": 800, "keep_last": 1, "keep_best": 0},
}


def parse(description, directory, words=None):
    """Arguments of a program that starts from the trained model."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--directory", type=pathlib.Path, default=directory)
    parser.add_argument("--text", type=pathlib.Path, default=DIRECTORY / "text")
    parser.add_argument("settings", nargs="*")
    return parser.parse_args(words)


def make_config(directory, text, *more):
    """Settings of the start, whose run is in `directory`."""
    paths = {"directory": str(directory / "start"), "data": {"path": str(text)}}
    return zjax.load_config(SETTINGS, *more, paths)


def train_start(directory, text, *more):
    """Trains the start unless it is there; returns the directory of the run.

    Args:
        directory: Folder that holds the run, `start`.
        text: Token files of `package_text.prepare_text`, which are made if missing.
        more: Further settings, such as a smaller model.
    """
    package_text.prepare_text(text)
    config = make_config(directory, text, *more)
    trainer = zjax.Trainer(config)
    if int(trainer.state.step) < config.num_steps:
        trainer.fit()
    return pathlib.Path(config.directory)


def main(words=None):
    given = parse(__doc__, DIRECTORY, words)
    use_program_cache()
    print(train_start(given.directory, given.text, *given.settings))


if __name__ == "__main__":
    main()
