"""A run that starts from another one has its statistics, too."""

import dataclasses

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zjax
from tests.support import models
from zjax.checkpoint.export import export_safetensors
from zjax.checkpoint.model_state import load_model_state
from zjax.checkpoint.store import Store
from zjax.errors import CheckpointError

BATCH = models.make_batch() | {"x": 5 + 3 * models.make_batch()["x"]}


class Linen(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x, train=False):
        x = flax.linen.BatchNorm(use_running_average=not train, name="norm")(x)
        return flax.linen.Dense(models.WIDTH, name="out")(x)


class NNX(nnx.Module):
    """Has a random key and a counter beside the statistics."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(models.WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(models.WIDTH, models.WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(self.norm(x)))


def loss_fn(model, batch, key):
    is_nnx = isinstance(model, nnx.Module)
    args = {} if is_nnx else {"train": key is not None}
    return jnp.mean((model(batch["x"], **args) - batch["y"]) ** 2)


def start(model, path="", **settings):
    config = {"precision.compute_dtype": "float32", "checkpoint.init_from": str(path)}
    return zjax.initialize(model, optax.sgd(0.1), loss_fn, BATCH, config | settings)


def evaluate(run, state):
    return float(run.evaluate(state, BATCH)["loss"])


@pytest.fixture(scope="module", params=["linen", "nnx"])
def trained(request, tmp_path_factory):
    """A model, the directory of its run, and its loss after a few steps."""
    model = Linen() if request.param == "linen" else NNX
    run, folder = start(model), tmp_path_factory.mktemp("run")
    state = run.state
    for _ in range(3):
        state, _ = run.step(state, BATCH)
    zjax.save(folder / "run", state, run)
    return model, folder / "run", evaluate(run, state)


def test_a_run_starts_from_the_statistics_of_another_one(trained, caplog):
    """Fails if the weights of a run normalise by the statistics of a new model."""
    model, folder, expected = trained
    run = start(model, folder, **{"zero.stage": 3, "seed": 1})
    np.testing.assert_allclose(evaluate(run, run.state), expected, rtol=1e-5)
    assert not [x for x in caplog.records if "model state" in x.getMessage()]
    run.step(run.state, BATCH)


def test_statistics_that_files_of_weights_lack_begin_anew(trained, caplog, tmp_path):
    model, folder, _ = trained
    path = tmp_path / "weights.safetensors"
    export_safetensors(Store(str(folder)), str(path))
    run = start(model, path)
    fresh = start(model)
    for new, first in zip(
        *map(jax.tree.leaves, (run.state.model_state, fresh.state.model_state)),
        strict=True,
    ):
        if not jnp.issubdtype(new.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(new, first)
    told = [x.getMessage() for x in caplog.records if "model state" in x.getMessage()]
    paths = "batch_stats/norm/" if isinstance(model, Linen) else "norm/"
    assert told == [
        f"checkpoint.init_from='{path}' holds no model state {paths}mean, "
        f"{paths}var, which begins anew"
    ]


def test_statistics_of_another_shape_are_refused(trained):
    model, folder, _ = trained
    run = start(model)
    rows = jax.tree.map(
        lambda row: dataclasses.replace(row, shape=(3,)) if row.shape else row,
        run.plan.model_state,
    )
    with pytest.raises(CheckpointError) as error:
        load_model_state(str(folder), run.state.model_state, rows)
    paths = "batch_stats/norm" if isinstance(model, Linen) else "norm"
    assert str(error.value).splitlines()[0] == (
        f"model_state/{paths}/mean='float32[3]' is float32[16] in {folder}; make the "
        "two agree"
    )
