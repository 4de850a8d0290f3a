"""What one layout saved goes on in another: experts, stages, heads, statistics."""

import dataclasses
import shutil
import types

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file

import zjax
from tests.support import models, small_run
from zjax.checkpoint import arrays
from zjax.checkpoint.export import export_safetensors
from zjax.checkpoint.start import load_model_state
from zjax.checkpoint.store import Store
from zjax.errors import CheckpointError
from zjax.sharding.placement import ArrayPlan
from zjax.weights.layers import joined_entries
from zjax.weights.source import Entry

EXPERTS = (
    "model.num_layers=2",
    "model.dropout_rate=0",
    "model.moe.num_experts=(2,4)",
    "model.moe.balance_scope=sequence",
    "optimizer.schedule=constant",
    "checkpoint.every_steps=0",
)


def test_losses_of_experts_go_on_on_other_devices(tmp_path):
    """Fails if layers of another kind are saved under one name."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    small_run.fit(whole, *EXPERTS, "num_steps=4", num_devices=1)
    small_run.fit(parts, *EXPERTS, "num_steps=2", num_devices=2)
    more = ("num_steps=4", "checkpoint.resume=required")
    trainer = small_run.fit(parts, *EXPERTS, *more, num_devices=1)
    assert trainer.state.master["blocks"].keys() == {"segment0", "segment1"}
    expected, found = small_run.losses(whole), small_run.losses(parts)
    assert sorted(found) == [1, 2, 3, 4]
    losses = [[each[step] for step in expected] for each in (found, expected)]
    np.testing.assert_allclose(*losses, rtol=1e-5)


SETTINGS = (
    "model.num_layers=3",
    "model.dropout_rate=0",
    "num_microbatches=4",
    "optimizer.schedule=constant",
    "optimizer.ema_decay=0.9",
)
STAGES = ("mesh.pipeline=2", "mesh.data=4")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two steps on two stages, of which the last one is filled up with a layer."""
    directory = tmp_path_factory.mktemp("saved")
    small_run.fit(directory, *SETTINGS, *STAGES, "num_steps=2")
    return directory


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Four steps on one device."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    four = "num_steps=4", small_run.EVALUATED
    trainer = small_run.fit(directory, *SETTINGS, *four, num_devices=1)
    return small_run.losses(directory), trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize(
    ("mesh", "num_devices"),
    [
        (("mesh.pipeline=3", "mesh.data=1", "mesh.tensor=2"), 6),
        pytest.param(("mesh.data=1",), 1, marks=pytest.mark.slow),
    ],
    ids=["other-stages", "one-device"],
)
def test_losses_go_on(saved, uninterrupted, tmp_path, mesh, num_devices):
    """Fails if layers are saved in the order of devices, or those that only fill up
    stages are; the loss of the evaluation is that of averaged weights."""
    directory = tmp_path / "run"
    shutil.copytree(saved, directory)
    more = ("num_steps=4", "checkpoint.resume=required", small_run.EVALUATED)
    trainer = small_run.fit(directory, *SETTINGS, *mesh, *more, num_devices=num_devices)
    losses, evaluated = uninterrupted
    found = small_run.losses(directory)
    assert sorted(found) == [1, 2, 3, 4]
    np.testing.assert_allclose(
        [found[step] for step in losses], list(losses.values()), rtol=1e-5
    )
    np.testing.assert_allclose(trainer.evaluate()["eval_loss"], evaluated, rtol=1e-5)


HEADS = (
    "model.num_heads=6",
    "model.num_kv_heads=6",
    "model.embed_size=24",
    "num_steps=2",
)


def kernel_of(trainer):
    return np.asarray(trainer.state.master["blocks"]["attention"]["query"]["kernel"])


def test_other_devices_and_exports_see_the_heads_of_the_model(tmp_path):
    """6 heads on 4 devices are 8 in memory, and 6 wherever they go."""
    split = small_run.make_trainer(tmp_path, *HEADS, "mesh.tensor=4", "mesh.data=2")
    split.fit()
    exported = tmp_path / "model.safetensors"
    export_safetensors(split.store, str(exported))
    stored = kernel_of(split)
    tokens = np.asarray(split.state.master["embedding"]["tokens"])
    split.close()
    alone = small_run.make_trainer(
        tmp_path, *HEADS, "checkpoint.resume=required", num_devices=1
    )
    assert stored.shape[2] == 8
    assert not stored[:, :, 6:].any()
    assert tokens.shape[0] == 64
    assert tokens[:61].any(1).all()
    assert not tokens[61:].any()
    np.testing.assert_array_equal(kernel_of(alone), stored[:, :, :6])
    (found,) = (x for name, x in load_file(exported).items() if "query.kernel" in name)
    np.testing.assert_array_equal(found, stored[:, :, :6])
    alone.close()


LOWER, UPPER = Entry((3,), "int16"), Entry((3,), "bfloat16")


def make_row(name, dtype="float32"):
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    place = NamedSharding(mesh, PartitionSpec())
    return ArrayPlan(name, (3,), jnp.dtype(dtype), place, place)


def test_a_tree_of_your_own_may_have_params(tmp_path):
    """Fails if all that is called so counts as a half of master weights."""
    rows = {"params": {"w": make_row("w")}, "opt": {"m": make_row("m")}}
    state = jax.tree.map(
        lambda row: jax.device_put(np.arange(3, dtype=np.float32), row.stored), rows
    )
    store = Store(str(tmp_path))
    store.save(1, state, rows, extra={})
    store.wait()
    assert sorted(store.source().entries) == ["opt/m", "params/w"]
    found, _ = store.restore(rows)
    jax.tree.map(np.testing.assert_array_equal, found, state)


@pytest.mark.parametrize(
    "other",
    [
        {"master/w": LOWER},
        {"master/w": LOWER, "params/w": Entry((4,), "bfloat16")},
        {"master/w": Entry((3,), "float32"), "params/w": UPPER},
        {"master/w": LOWER, "params/v": UPPER},
    ],
    ids=["no upper half", "another shape", "whole weights", "another name"],
)
def test_other_arrays_are_unchanged(other):
    """Fails if a file that lacks a half restores as if it had both."""
    assert joined_entries(other) == other
    assert list(joined_entries({"master/w": LOWER, "params/w": UPPER})) == ["master/w"]


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_memory_is_pinned_for_the_copies_that_are_taken(monkeypatch, memory):
    """Fails if parameters are pinned in the pool that the low bits fill."""
    rows = [make_row("upper"), make_row("lower", "int16").stored_in(memory)]
    pinned = []
    gpu = types.SimpleNamespace(platform="gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    monkeypatch.setattr(jax, "device_put", lambda x, place: pinned.append(x.dtype))
    monkeypatch.setattr(arrays, "SingleDeviceSharding", lambda device, **kind: device)
    arrays.pin(rows)
    assert len(pinned) == (2 if memory == "device" else 0)


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
