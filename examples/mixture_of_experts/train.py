"""A mixture of experts learns Python; a picture shows what experts specialise in."""

import argparse
import math
import pathlib
import re

import jax
import matplotlib.pyplot as plt
import numpy as np

import zjax
from zjax.observe import plot_load

EXPERTS, TOP_K, EXPERT_SIZE = 8, 2, 256
SETTINGS = {
    "global_batch_size": 16,
    "zero.stage": 2,
    "precision.compute_dtype": "float32",
    "model": {"num_layers": 4, "embed_size": 128, "num_heads": 4, "max_length": 128},
    "optimizer.peak_learning_rate": 2e-3,
}
MIXTURE = {
    "model.moe": {"num_experts": EXPERTS, "top_k": TOP_K, "expert_size": EXPERT_SIZE}
}
DENSE = {"model.mlp_size": TOP_K * EXPERT_SIZE}  # the same work per token
KINDS = {
    "line break": rb"\n",
    "indentation": rb"(?<=\n) +",
    "other space": rb"[ \t]",
    "beginning of a word": rb"(?<![A-Za-z0-9_])[A-Za-z_]",
    "rest of a word": rb"[A-Za-z_]",
    "digit": rb"[0-9]",
    "bracket": rb"[()\[\]{}]",
    "quotation mark": rb"['\"`]",
    "dot, comma, colon": rb"[.,:;]",
    "other sign": rb"[\x00-\xff]",
}
PATTERN = re.compile(b"|".join(rb"(%b)" % pattern for pattern in KINDS.values()))


def kinds_of(text):
    """The kind of each byte of a text, as its number in `KINDS`."""
    found = [(m.lastindex - 1, m.end() - m.start()) for m in PATTERN.finditer(text)]
    return np.repeat(*np.transpose(found))


def shares_by_kind(experts, kinds):
    """The part of the choices of each kind that each expert gets, float[kinds, E]."""
    counts = np.zeros((len(KINDS), EXPERTS))
    np.add.at(counts, (kinds[:, None], experts), 1)
    return counts / np.maximum(counts.sum(1, keepdims=True), 1)


def favourites(experts, text, least=20):
    """For each expert the five bytes that choose it most often, if not rare."""
    counts = np.zeros((256, EXPERTS))
    np.add.at(counts, (np.frombuffer(text, np.uint8)[:, None], experts), 1)
    counts[counts.sum(1) < least * TOP_K] = 0
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return [bytes(np.argsort(-column)[:5].astype(np.uint8)) for column in shares.T]


def plot_specialisation(layers, path):
    figure, row = plt.subplots(
        1, len(layers), figsize=(11, 4), sharey=True, layout="constrained"
    )
    for number, (axes, shares) in enumerate(zip(row, layers, strict=True)):
        image = axes.imshow(shares, "Blues", vmin=0, vmax=0.5, aspect="auto")
        axes.set_title(f"layer {number}")
        axes.set_xlabel("expert")
        axes.set_xticks(range(EXPERTS))
    row[0].set_yticks(range(len(KINDS)), KINDS)
    bar = figure.colorbar(image, ax=row, extend="max")
    bar.set_label("share of the choices of a kind")
    figure.savefig(path, dpi=100)


def train(run, config):
    """Takes all steps; returns the state and the load of the experts by step."""
    state, history = run.state, []
    with zjax.make_loader(
        config, run.batch_placement, num_batches=config.num_steps
    ) as loader:
        for i, batch in enumerate(loader):
            state, metrics = run.step(state, batch)
            if "load" in metrics:
                load = np.asarray(metrics["load"]).tolist()
                history.append({"step": i + 1, "load": load})
            if i % 50 == 0 or i == config.num_steps - 1:
                print(f"step {i}: loss {metrics['loss']:.3f}", flush=True)
    return state, history


def read_unseen(run, config, num_batches=8):
    """Batches that follow those of the training."""
    with zjax.make_loader(
        config,
        run.batch_placement,
        start_step=config.num_steps,
        num_batches=num_batches,
    ) as loader:
        return list(loader)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--dense", action="store_true", help="without experts")
    parser.add_argument("--directory", default="runs/mixture_of_experts")
    args = parser.parse_args()

    jax.config.update("jax_num_cpu_devices", 8)  # no effect on a machine with GPUs
    expert_axis = math.gcd(2, jax.device_count())
    config = zjax.load_config(
        SETTINGS,
        DENSE if args.dense else MIXTURE | {"mesh.expert": expert_axis},
        {
            "num_steps": args.steps,
            "optimizer.schedule.num_warmup_steps": args.steps // 10,
        },
    )
    model = zjax.make_model(config)
    run = zjax.make_run(config, model, zjax.make_optimizer(config, model))
    print(zjax.describe_plan_totals(run.plan))
    state, history = train(run, config)

    batches = read_unseen(run, config)
    values = [run.evaluate(state, batch) for batch in batches]
    losses = [x["loss"] - x.get("auxiliary_loss", 0) for x in values]
    print(f"loss on unseen text: {np.mean(losses):.3f}")
    if args.dense:
        return

    directory = pathlib.Path(args.directory)
    directory.mkdir(parents=True, exist_ok=True)
    plot_load(history, directory / "load.png", title="load of the experts")
    tokens = np.concatenate([batch["tokens"] for batch in batches])
    text = np.minimum(tokens, 255).astype(np.uint8).tobytes()
    chosen = zjax.chosen_experts(run.bind(state), {"tokens": tokens})
    layers = [np.asarray(experts).reshape(-1, TOP_K) for experts in chosen]
    kinds = kinds_of(text)
    plot_specialisation(
        [shares_by_kind(experts, kinds) for experts in layers],
        directory / "specialisation.png",
    )
    for number, experts in enumerate(layers):
        print(f"layer {number}:", *favourites(experts, text))
    print("pictures:", directory)


if __name__ == "__main__":
    main()
