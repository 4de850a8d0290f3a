"""A small Llama is trained, compressed in many ways, and read back: size against loss.

python examples/compress/run.py [--directory=runs/compress] [--further_steps=150]
    [setting=value ...]

Each command is printed before it runs. Finished runs are read, and files that are
there are not written again.
"""

import argparse
import pathlib
import shlex
import subprocess
import sys

import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import zjax
from zjax.data import find_evaluation
from zjax.run.compiler import use_program_cache

MODEL = pathlib.Path(__file__).parent / "model.py"
HUGGINGFACE = "export --format=hf --dtype=bfloat16"
# Weights that stay plain go out in the compute dtype.
RECIPE = "compress --config.precision.compute_dtype=bfloat16 --recipe="
FILES = {
    "large": ("large", HUGGINGFACE),
    "large-w8a8_smoothquant": ("large", f"{RECIPE}w8a8_smoothquant"),
    "large-w4a16": ("large", f"{HUGGINGFACE} --quantize=w4a16"),
    "large-w4a16_awq": ("large", f"{RECIPE}w4a16_awq"),
    "large-w4a16_gptq": ("large", f"{RECIPE}w4a16_gptq"),
    "large-q8_0.gguf": ("large", "export --format=gguf --quantize=q8_0"),
    "large-q4_0.gguf": ("large", "export --format=gguf --quantize=q4_0"),
    "longer": ("longer", HUGGINGFACE),
    "longer-w4a16_gptq": ("longer", f"{RECIPE}w4a16_gptq"),
    "qat-w4a16": ("qat", f"{HUGGINGFACE} --quantize=w4a16"),
    "half": ("half", HUGGINGFACE),
    "half-w4a16_gptq": ("half", f"{RECIPE}w4a16_gptq"),
}
"""The run of each file, and the command that writes the file."""
ROUNDED_ACTIVATIONS = {
    "quantize.rules": [{"weights": "compute", "activations": "int8"}]
}
"""What a server of `w8a8` does besides: files hold no activations."""


def runs_of(start, num_layers, further_steps):
    """Settings of runs by name; all but the first begin with the first's weights."""
    further = [
        f"checkpoint.init_from={start}",
        f"num_steps={further_steps}",
        "optimizer.peak_learning_rate=5e-4",
    ]
    half = [
        f"model.num_layers={num_layers // 2}",
        "prune.layers=influence",
        f"distill.teacher={start}",
        "distill.hidden.weight=1",
    ]
    return {
        "large": [],
        "longer": further,
        "qat": [*further, "quantize.rules=[{'weights': 'int4'}]"],
        "half": [*further, *half],
    }


def call(*words):
    """Runs a command of zjax, printed as it is typed."""
    print(f"\n$ zjax {shlex.join(words)}", flush=True)
    subprocess.run([sys.executable, "-m", "zjax.cli.main", *words], check=True)


def make_runs(folder, settings, further_steps):
    """Trains all runs; returns the config of each by name."""
    num_layers = zjax.load_config(MODEL, *settings).model.num_layers
    configs = {}
    for name, own in runs_of(folder / "large", num_layers, further_steps).items():
        changes = [f"directory={folder / name}", *settings, *own]
        call("train", f"--config={MODEL}", *(f"--config.{x}" for x in changes))
        configs[name] = zjax.load_config(MODEL, *changes)
    return configs


def make_files(folder):
    """Writes the files that are missing; returns the path of each by name."""
    paths = {name: folder / "files" / name for name in FILES}
    for name, (run, command) in FILES.items():
        if not paths[name].exists():
            call(*command.split(), f"--run={folder / run}", f"--output={paths[name]}")
    return paths


def size_of(path):
    """Bytes of weights: of a GGUF file, or of the safetensors in a directory."""
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


@nnx.jit
def read(decoder, batch):
    """Returns the loss of a batch, and the most likely token after each token."""
    logits = decoder(batch["tokens"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return losses.mean(), logits.argmax(-1)


def measure(path, config):
    """Reads weights back; returns loss and most likely tokens of unseen text."""
    start = {"checkpoint.init_from": str(path)}
    start |= dict.fromkeys(["prune", "distill", "quantize"])
    rounded = ROUNDED_ACTIVATIONS if "w8a8" in path.name else {}
    trainer = zjax.Trainer(zjax.load_config(config, start, rounded), step=0)
    decoder = trainer.run.bind(trainer.state)
    unseen = find_evaluation(trainer.config, trainer.run.batch_placement)
    with unseen.open_batches() as batches:
        found = [read(decoder, filled.batch) for filled in batches]
    losses, tokens = zip(*found, strict=True)
    return float(np.mean(losses)), np.concatenate(tokens)


def show(table):
    """Prints a row of each file."""
    print(f"\n{'weights':24} {'kB':>7} {'loss':>7} {'same tokens':>12}")
    for name, (size, loss, same) in table.items():
        print(f"{name:24} {size / 1e3:7.0f} {loss:7.4f} {same:12.1%}")


def draw(table, path):
    """Draws the loss of each file against the size."""
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    markers = {"large": "o", "longer": "s", "qat": "D", "half": "^"}
    for name, (size, loss, _) in table.items():
        axes.plot(size / 1e3, loss, markers[FILES[name][0]], label=name)
    axes.set(xlabel="size in kB", ylabel="loss on unseen text (nats per byte)")
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--directory", type=pathlib.Path, default=pathlib.Path("runs/compress")
    )
    parser.add_argument("--further_steps", type=int, default=150)
    parser.add_argument("settings", nargs="*", help="such as model.num_layers=8")
    given = parser.parse_args(words)
    use_program_cache()
    folder = given.directory
    configs = make_runs(folder, given.settings, given.further_steps)
    paths = make_files(folder)
    found = {x: measure(path, configs[FILES[x][0]]) for x, path in paths.items()}
    expected = found["large"][1]
    table = {
        name: (size_of(paths[name]), loss, np.mean(tokens == expected))
        for name, (loss, tokens) in found.items()
    }
    show(table)
    draw(table, folder / "size_and_loss.png")
    print(f"picture: {folder / 'size_and_loss.png'}")
    call("generate", f"--model={paths['large-w4a16_gptq']}", "--prompt=import ")


if __name__ == "__main__":
    main()
