"""The batches of a run as arrays, for peers that know nothing of zjax."""

import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import methods
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import zjax
from zjax.data import find_evaluation
from zjax.settings.mappings import to_mapping


def write_text(path: pathlib.Path, settings: Sequence[str]) -> None:
    """Writes all batches of training and evaluation, and the settings that matter.

    Args:
        path: File `.npz` with `train` (int32[steps, B, L + 1]), `held_out` (the same of
            the evaluation) and `settings` (JSON).
        settings: Changes of `methods.BASE` and `methods.LONGER`.
    """
    jax.config.update("jax_platforms", "cpu")
    config = zjax.load_config(methods.BASE, methods.LONGER, *settings)
    mesh = zjax.make_mesh(config.mesh, jax.devices()[:1])
    replicated = NamedSharding(mesh, PartitionSpec())
    held_out = find_evaluation(config, lambda _: replicated)
    with zjax.make_loader(
        config, lambda _: replicated, num_batches=config.num_steps
    ) as loader:
        train = sequences(loader)
    with held_out.open_batches() as batches:
        held_out_rows = sequences(filled.batch for filled in batches)
    text = json.dumps(peer_settings(config))
    np.savez(path, train=train, held_out=held_out_rows, settings=text)


def sequences(batches: Iterable[dict[str, Any]]) -> np.ndarray:
    """Tokens with the target of the last one, int32[batches, B, L + 1]."""
    return np.stack(
        [np.concatenate([x["tokens"], x["targets"][:, -1:]], 1) for x in batches]
    )


def peer_settings(config: zjax.Config) -> dict[str, Any]:
    """Shape of the model, optimizer, and steps between evaluations."""
    model, optimizer = config.model, config.optimizer
    settings = to_mapping(optimizer)
    rule, schedule = settings["rule"], settings["schedule"]
    return {
        "shape": {
            "num_layers": model.num_layers,
            "embed_size": model.embed_size,
            "num_heads": model.num_heads,
            "vocab_size": model.vocab_size,
            "length": config.data.length,
        },
        "adam": {
            "lr": optimizer.peak_learning_rate,
            "betas": [rule["b1"], rule["b2"]],
            "eps": rule["eps"],
            "weight_decay": optimizer.weight_decay,
        },
        "num_warmup_steps": schedule["num_warmup_steps"],
        "evaluate_every": config.evaluation.every_steps,
    }
