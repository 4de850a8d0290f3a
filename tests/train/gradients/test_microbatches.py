"""Which rows a microbatch has, and what it has whole."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zjax
from tests.support import lines, models
from zjax.observe.collectives import list_collectives
from zjax.sharding import plan
from zjax.train import microbatches
from zjax.typing import Entry

TABLE = 3 + np.arange(5, dtype=np.float32)
HOST = {"offload": "pinned_host", "stage": 1}
WAYS = {
    "one device": {"num_devices": 1},
    "the compiler adds": {"num_devices": 2},
    "devices add": {
        "num_devices": 2,
        "precision": {"compute_dtype": "bfloat16", "reduce_dtype": "float32"},
    },
    "pipeline": {"num_devices": 4, "mesh": {"pipeline": 2}},
    "state on the host": {"num_devices": 2, "zero": HOST},
    "blocks one by one": {"num_devices": 2, "zero": HOST, "takes_layers_apart": True},
}


def compared(params, x, batch):
    """The loss of each pair of neighbours, by the last number of a table."""
    scores = jnp.float32(x @ params["head"])[:, 0]
    pairs = (scores[::2] - scores[1::2]) ** 2
    return batch["table"][-1] * pairs.sum(), jnp.float32(pairs.size), {}


def first_step(num_microbatches, *, num_devices, takes_layers_apart=False, **settings):
    model = lines.make_model(lines.block, 2, head=compared)
    model = dataclasses.replace(
        model, separable=False, takes_layers_apart=takes_layers_apart
    )
    if num_devices > 1:  # one device runs the loop, as the reference
        model = dataclasses.replace(model, loss=zjax.loss_of(model.stack))
    batch = lines.make_batch() | {"table": TABLE}
    fixed = {
        "num_microbatches": num_microbatches,
        "optimizer": {"name": "sgd", "num_warmup_steps": 0},
        "precision": {"compute_dtype": "float32"},
    }
    run = zjax.initialize(
        model,
        None,
        None,
        batch,
        fixed | settings,
        replicated=["table"],
        devices=jax.devices()[:num_devices],
    )
    _, metrics = run.step(run.state, batch)
    return float(metrics["loss"]), float(metrics["grad_norm"])


@pytest.fixture(scope="module")
def as_one():
    return first_step(1, num_devices=1)


@pytest.mark.parametrize("way", WAYS)
def test_neighbours_stay_together(way, as_one, monkeypatch):
    """Fails if a way of its own deals rows out in turn, or cuts a replicated table."""
    monkeypatch.setattr(plan, "MIN_MOVED_BYTES", 0)
    rounds = "precision" in WAYS[way]
    found = first_step(4, **WAYS[way])
    np.testing.assert_allclose(found, as_one, rtol=2e-2 if rounds else 1e-5)


def model(*, separable, **entries):
    made = dataclasses.replace(models.make_mlp(), separable=separable)
    return dataclasses.replace(made, entries=entries)


def test_each_device_cuts_its_own_rows():
    batch = {"x": jnp.arange(16), "scale": jnp.float32(2), "table": jnp.arange(3)}
    coupled = model(separable=False, table=Entry((3,)))
    parts = microbatches.split_batch(batch, coupled, 2, 4)
    assert parts["x"].tolist() == [
        [0, 1, 4, 5, 8, 9, 12, 13],
        [2, 3, 6, 7, 10, 11, 14, 15],
    ]
    assert parts["scale"].tolist() == [2, 2]
    assert parts["table"].tolist() == 2 * [[0, 1, 2]]


def test_rows_that_are_not_compared_are_in_the_same_microbatch_on_all_meshes():
    """Fails if meshes draw other dropout."""
    batch = jnp.arange(16)
    many, one = (
        microbatches.split_batch(batch, model(separable=True), 2, n) for n in (4, 1)
    )
    assert many.tolist() == one.tolist() == [[*range(0, 16, 2)], [*range(1, 16, 2)]]
    for part in np.asarray(many):
        assert (part.reshape(4, 2) // 4).tolist() == [[n, n] for n in range(4)]


@pytest.mark.parametrize("separable", [True, False])
def test_cutting_a_batch_moves_no_row(separable):
    """Fails if microbatches of the whole batch are made, which devices would send."""
    devices = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    batch = jax.device_put(
        jnp.arange(64.0).reshape(32, 2), jax.NamedSharding(devices, jax.P("data"))
    )

    def cut(batch):
        parts = microbatches.split_batch(batch, model(separable=separable), 2, 8)
        return jax.lax.scan(lambda x, part: (x, part * 2), 0, parts)[1]

    places = jax.NamedSharding(devices, jax.P(None, "data"))
    text = jax.jit(cut, out_shardings=places).lower(batch).compile().as_text()
    assert list_collectives(text) == []


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_loss_without_weight_teaches_nothing_however_it_is_cut(num_microbatches):
    """Fails if the only microbatch counts whatever its weight."""
    params = lambda key: {"w": jnp.ones(4)}, lambda params, x: x @ params["w"]
    x = np.ones((8, 4), np.float32)

    def loss_fn(model, batch, key):
        out = model(batch["x"])
        return jnp.mean(out), batch["of"].astype(jnp.float32), {"out": jnp.mean(out)}

    run = zjax.initialize(
        params,
        optax.sgd(0.125),
        loss_fn,
        {"x": x, "of": np.float32(0)},
        {"global_batch_size": 8, "microbatch_size": 8 // num_microbatches},
        devices=jax.devices()[:1],
    )
    state = run.state
    for of, loss, w, skipped in (
        (0, 0, 1, 1),
        (np.nan, np.nan, 1, 2),
        (3, 4, 0.875, 2),
    ):
        state, metrics = run.step(state, {"x": x, "of": np.float32(of)})
        np.testing.assert_equal(float(metrics["loss"]), loss)
        np.testing.assert_allclose(run.bind(state)(x[:1]), 4 * w, rtol=1e-6)
        assert int(metrics["skipped_steps"]) == skipped
