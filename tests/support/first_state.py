"""First states placed from NumPy: no program draws them, and every array matters."""

import dataclasses

import jax
import numpy as np

from zjax.ops.weights import low_bits
from zjax.sharding.layers import take_apart
from zjax.sharding.placement import Form, abstract_key
from zjax.sharding.roles import trained
from zjax.train.state import first_scalars, place_given


def first_state(config, model, weights=None):
    """The `restore` of `make_run`: weights, and zeros for what an optimizer keeps."""
    weights = first_weights(model.init) if weights is None else weights

    def read(rows):
        params = take_apart(weights, rows.master)
        learned = trained(params, rows.master)
        others = dataclasses.replace(rows, master=(), ema=(), params=(), scaler=())
        return dataclasses.replace(
            jax.tree.map(_zeros, others),
            **jax.device_put(first_scalars(config.precision), rows.step.stored),
            master=jax.tree.map(_master, params, rows.master),
            ema=rows.ema and place_given(learned, rows.ema),
            params=rows.params
            and jax.tree.map(
                lambda row, x: row and place_given(x, row),
                *(rows.params, learned),
                is_leaf=lambda row: row is None,
            ),
        )

    return read


def placed(model):
    """The model with its own first weights of seed 0, which no run has to draw."""

    def given():
        return jax.tree.map(np.asarray, model.init(jax.random.key(0)))

    return dataclasses.replace(model, given=given)


def _zeros(row):
    return place_given(np.zeros(row.shape, row.dtype), row)


def _master(x, row):
    return place_given(x if row.form is Form.PLAIN else low_bits(np.asarray(x)), row)


def first_weights(init, deviation=0.2):
    """Weights by the shapes of what a model draws, scales around 1."""
    shapes, _ = jax.eval_shape(init, abstract_key())
    rng = np.random.default_rng(1)

    def draw(keys, x):
        mean = keys[-1].key in ("scale", "magnitude")
        drawn = np.float32(mean + deviation * rng.normal(size=x.shape))
        # Odd bits: a weight half-way between two bfloat16 numbers splits inexactly.
        return (drawn.view(np.int32) | 1).view(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)
