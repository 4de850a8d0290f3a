"""Weights of a model whose feed-forward is tiled, and of the same without tiles."""

import dataclasses

import jax
import numpy as np

from tests.support.first_state import first_weights
from zjax.models.build import make_model
from zjax.sharding.naming import path_of
from zjax.sharding.placement import abstract_key
from zjax.weights.source import name_leaves

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


def first_weights_of(config):
    """The same weights for any number of tiles."""
    whole = dataclasses.replace(
        config, model=dataclasses.replace(config.model, mlp_tiles=1)
    )
    flat = cut(first_weights(make_model(whole).init), config.model.mlp_tiles)
    shapes, _ = jax.eval_shape(make_model(config).init, abstract_key())
    return jax.tree_util.tree_map_with_path(lambda keys, _: flat[path_of(keys)], shapes)
