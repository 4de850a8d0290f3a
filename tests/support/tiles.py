"""Weights of a model whose feed-forward is tiled, and of the same without tiles."""

import dataclasses

import numpy as np
import safetensors.numpy

from tests.support import language
from zjax.checkpoint.layout import name_leaves
from zjax.settings import schema

HIDDEN_DIM = {"up/kernel": 2, "gate/kernel": 2, "down/kernel": 1}
HIDDEN_DIM |= {"up/bias": 1, "gate/bias": 1}
"""Of the stacked arrays of a feed-forward that are cut."""


def cut(weights, num_tiles):
    """Arrays by path, as a model with tiles names them, from one without."""
    found = {}
    for name, x in name_leaves(weights).items():
        of_mlp = name.removeprefix("blocks/mlp/")
        if of_mlp not in HIDDEN_DIM or num_tiles == 1:
            found[name] = np.asarray(x)
            continue
        parts = np.split(np.asarray(x), num_tiles, HIDDEN_DIM[of_mlp])
        for number, part in enumerate(parts):
            found[f"blocks/mlp/tiles/{number}/{of_mlp}"] = part
    return found


def started_from_the_same(config, directory):
    """The settings with large weights to start from, the same for any tiles."""
    whole = dataclasses.replace(config.model, mlp_tiles=1)
    weights = language.params_of(language.make_language_model(whole))
    path = directory / "weights.safetensors"
    tensors = {n.replace("/", "."): np.asarray(x) for n, x in cut(weights, 1).items()}
    safetensors.numpy.save_file(tensors, path)
    checkpoint = schema.Checkpoint(init_from=str(path))
    return dataclasses.replace(config, checkpoint=checkpoint)
