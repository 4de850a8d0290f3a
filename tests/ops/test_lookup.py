"""Rows of a table, and the gradient of those that many look up."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.language import BERT, GPT, make_language_model
from zjax.config.schema import Config, Data
from zjax.models.build import make_model
from zjax.ops import lookup
from zjax.ops.lookup import look_up


def gradient(table, indices, cotangent, deterministic=False):
    def rows(table):
        return look_up(table, indices, deterministic)

    return jax.vjp(rows, table)[1](cotangent)[0]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_and_their_gradient(monkeypatch, dtype, deterministic):
    monkeypatch.setattr(lookup, "ROWS_AT_ONCE", 4)
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(7, 3)), dtype)
    indices = jnp.asarray(rng.integers(0, 7, (2, 5)))
    cotangent = jnp.asarray(rng.normal(size=(2, 5, 3)), dtype)
    np.testing.assert_array_equal(look_up(table, indices), table[indices])
    expected = np.zeros((7, 3))
    np.add.at(expected, indices, np.asarray(cotangent, np.float64))
    found = gradient(table, indices, cotangent, deterministic)
    assert found.dtype == table.dtype
    np.testing.assert_allclose(
        np.asarray(found, np.float64),
        expected,
        rtol=1e-2 if dtype != "float32" else 1e-6,
    )


def test_a_frequent_row_loses_nothing():
    """Fails if rows are added up in bfloat16, where 256 + 1 is 256."""
    table, indices = jnp.zeros((2, 1), jnp.bfloat16), jnp.zeros(4096, jnp.int32)
    found = gradient(table, indices, jnp.ones((4096, 1), jnp.bfloat16))
    assert found.tolist() == [[4096.0], [0.0]]


def test_deterministic_models_add_nothing_in_passing():
    """Fails if `deterministic` leaves a sum to the order of threads."""
    config = Config(model=GPT, data=Data(length=8), deterministic=True)
    model = make_model(config)
    params, state = jax.eval_shape(model.init, jax.random.key(0))
    batch = {name: jnp.zeros((2, 8), jnp.int32) for name in ("tokens", "targets")}

    def loss(params):
        return model.loss(params, state, batch, None).value

    text = str(jax.make_jaxpr(jax.grad(loss))(params))
    assert "scatter-add" not in text
    assert "dot_general" in text


@pytest.mark.parametrize("config", [GPT, BERT])
def test_models_look_up_all_their_tables_so(config):
    """Fails if a table of a model is read in another way."""
    model = make_language_model(config)
    graph, state = nnx.split(model)
    state = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state)
    numbers = jnp.zeros((2, 8), jnp.int32)
    names = ("tokens", "targets", "positions", "segment_ids", "token_types")
    batch = dict.fromkeys(names, numbers) | {"weights": jnp.ones((2, 8))}

    def loss(state):
        return nnx.merge(graph, state).loss(batch, None)[0]

    text = str(jax.make_jaxpr(jax.grad(loss))(state))
    added = re.findall(r":(\w+)\[\d+,\d+\] = scatter-add", text)
    assert len(added) >= 2
    assert {*added} == {"f32"}
