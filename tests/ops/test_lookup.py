"""Rows of a table, and the gradient of those that many look up."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.support.language import BERT, GPT, make_language_model, sums_of
from zjax.models.build import make_model
from zjax.ops import lookup
from zjax.ops.lookup import look_up
from zjax.run.initialize import make_run
from zjax.settings.schema import Config, Data, Mesh, Precision
from zjax.typing import IGNORED


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


@pytest.mark.parametrize("key", [None, jax.random.key(0)], ids=["none", "training"])
def test_deterministic_models_add_nothing_in_passing(key):
    """Fails if `deterministic` leaves a sum to the order of threads."""
    config = Config(model=GPT, data=Data(length=8), deterministic=True)
    model = make_model(config)
    params, state = jax.eval_shape(model.init, jax.random.key(0))
    batch = {name: jnp.zeros((2, 8), jnp.int32) for name in ("tokens", "targets")}

    def loss(params):
        return model.loss(params, state, batch, key).value

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
        return sums_of(nnx.merge(graph, state), batch).loss_sum

    text = str(jax.make_jaxpr(jax.grad(loss))(state))
    added = re.findall(r":(\w+)\[\d+,\d+\] = scatter-add", text)
    assert len(added) >= 2
    assert {*added} == {"f32"}


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_is_no_row_finds_zeros_and_adds_nothing(deterministic):
    """Fails if numbers count from the end, or are clamped to the last row, which no
    table that devices share does."""
    table, indices = jnp.ones((3, 1)), jnp.array([-1, 3, -100, 2])
    assert look_up(table, indices).tolist() == [[0], [0], [0], [1]]
    found = gradient(table, indices, jnp.ones((4, 1)), deterministic)
    assert found.tolist() == [[0], [0], [1]]


def evaluated(tensor, batch):
    """Loss and weight of a batch that is on the devices already."""
    config = Config(
        global_batch_size=2,
        model=GPT,
        data=Data(length=8),
        mesh=Mesh(tensor=tensor),
        precision=Precision(compute_dtype="float32"),
    )
    model, devices = make_model(config), jax.devices()[:tensor]
    run = make_run(config, model, optax.sgd(0.1), devices=devices)
    metrics = run.evaluate(run.state, batch)
    return float(metrics["loss"]), float(metrics["weight"])


def test_meshes_agree_on_ids_that_have_no_row():
    """Fails if the loss depends on how many devices hold the vocabulary."""
    tokens = jnp.arange(16).reshape(2, 8)
    targets = tokens.at[0, :2].set(IGNORED)
    outside = tokens.at[0, 3].set(GPT.vocab_size).at[1, 2].set(-1)
    batches = [{"tokens": x, "targets": targets} for x in (tokens, outside)]
    alone, of_two = ([evaluated(n, batch) for batch in batches] for n in (1, 2))
    np.testing.assert_allclose(of_two, alone, rtol=1e-6)
    assert alone[0][0] != alone[1][0]
    assert [weight for _, weight in alone] == [14, 14]
