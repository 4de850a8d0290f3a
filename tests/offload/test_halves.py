"""Master weights that lack the half that is in use."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

import zjax
from tests.support import small_run
from tests.support.offload import (
    GPT,
    LLAMA,
    UNDER_BACKWARD,
    Perceptron,
    in_memory,
    make_batch,
    make_config,
    memories,
    start,
    train,
    weights_of,
)
from zjax.checkpoint.export import export_safetensors
from zjax.checkpoint.store import Store
from zjax.estimate.tables import traffic_of_step
from zjax.models.build import make_model
from zjax.optim.build import make_optimizer
from zjax.replicas.state import saved_rows, saved_state
from zjax.settings import schema
from zjax.sharding import memory
from zjax.sharding import mesh as meshes
from zjax.sharding import plan as plans
from zjax.sharding.placement import Form
from zjax.sharding.plan import DEVICE, HOST, NVME
from zjax.train.state import with_params


def halves(stage=2, state_memory="pinned_host", **sections):
    precision = sections.pop("precision", {}) | {"compute_dtype": "bfloat16"}
    return make_config(state_memory, stage, precision=precision, **sections)


def lower_halves(run):
    return halves_of(run.plan)


def halves_of(plan):
    return [row for row in jax.tree.leaves(plan.master) if row.form is Form.SPLIT]


def plan_of(config):
    model = make_model(config)
    mesh = meshes.make_mesh(config.mesh)
    return plans.make_plan(config, mesh, model, make_optimizer(config, model))


@pytest.fixture
def whole(monkeypatch):
    """Keeps master weights whole, as they are where nothing else holds a half."""

    def use(case):
        with monkeypatch.context() as patched:
            patched.setattr(plans, "_split", lambda row, in_use: row)
            run = start(case)
        assert not lower_halves(run)
        return run

    return use


def test_two_bytes_of_each_master_weight_rest_and_move():
    """Fails if halves are made and all of the weights rest beside them."""
    run = start(halves(3))
    moved = [row for row in lower_halves(run) if row.memory == HOST]
    assert len(moved) > 10
    weights = sum(row.device_bytes for row in moved) // 2
    state = memory.tree_bytes(
        [row for row in jax.tree.leaves(run.plan.opt_state) if row.memory == HOST]
    )
    assert state == 8 * weights
    assert memory.stored_bytes(run.plan).host == 10 * weights
    assert sum(run.step.executor.step.group_bytes) == 10 * weights
    state, _ = train(run, 1)
    assert {x.dtype for x in jax.tree.leaves(state.master)} == {jnp.dtype("int16")}
    assert memories((state.master, state.opt_state)) == {"pinned_host"}
    assert memories(state.params) == {"device"}


BLOCKS_ON_HOST = {"zero": {"parameter_memory": "pinned_host"}}


@pytest.mark.parametrize("waits", [True, False])
def test_both_halves_may_rest_on_the_host(waits, monkeypatch):
    """Fails if weights rest there whole beside those in use, or if these come up for an
    update while the backward pass of their block has them on the devices."""
    run = start(halves(0, **BLOCKS_ON_HOST, **({} if waits else UNDER_BACKWARD)))
    step = run.step.executor.step
    lower, upper = (
        sum(row.device_bytes for row in jax.tree.leaves(rows) if row.memory == HOST)
        for rows in (run.plan.master, run.plan.compute)
    )
    assert memory.stored_bytes(run.plan).host == 5 * lower + upper
    again = upper if waits else 0
    assert sum(step.group_bytes) == 5 * lower + again
    told = traffic_of_step(run.plan, run.config)
    assert [x.up for x in told] == [5 * lower, 2 * upper + again]
    came = watch_bytes(monkeypatch, step.stream)
    state, _ = train(run, 1)
    assert memories(state.params["blocks"]) == {"pinned_host"}
    names = {name[0] for name in came if isinstance(name, tuple)}
    assert names == ({"parameters"} if waits else set())
    assert sum(came.values()) == sum(step.group_bytes)


def watch_bytes(monkeypatch, stream):
    """Records the bytes of every load that is brought up."""
    seen, bring = {}, stream._copy_next

    def watched():
        load = stream.waiting[0]
        seen[load.name] = load.moved_bytes
        bring()

    monkeypatch.setattr(stream, "_copy_next", watched)
    return seen


def test_other_weights_stay_whole():
    """Fails if a half is taken of what is in use in another type."""
    for dtype in ("float32", "float16"):
        other = make_config("pinned_host", precision={"compute_dtype": dtype})
        assert not halves_of(plan_of(other))
    assert not halves_of(plan_of(halves(precision={"master_dtype": "bfloat16"})))
    assert not halves_of(plan_of(halves(state_memory="device")))
    assert halves_of(plan_of(halves())), "nothing to see"


CASES = {
    "averaged weights": {"optimizer": {"ema_decay": 0.9}},
    "tiles on the host, stage 3, two microbatches": {
        "stage": 3,
        "model": dataclasses.replace(LLAMA, mlp_tiles=3),
        "num_microbatches": 2,
        **BLOCKS_ON_HOST,
        **UNDER_BACKWARD,
    },
    "disks, blocks too, delayed": {
        "state_memory": "nvme",
        "zero": {"parameter_memory": "nvme", "delay_updates_from": 2},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_trajectory_is_that_of_whole_master_weights(case, whole, tmp_path):
    """Fails if a half is lost, stale, or of another weight: it is worth 4e-3."""
    settings = dict(CASES[case])
    if settings.get("state_memory") == "nvme":
        disks = {"nvme_paths": (str(tmp_path),)}
        settings["zero"] = settings.get("zero", {}) | disks
    config = halves(**settings)
    run, other = start(config), whole(config)
    assert lower_halves(run)
    (state, found), (expected, metrics) = train(run), train(other)
    for x, y in zip(found, metrics, strict=True):
        np.testing.assert_allclose([*x.values()], [y[n] for n in x], 1e-5)
    pairs = (weights_of(state), state.ema), (weights_of(expected), expected.ema)
    for x, y in zip(*map(jax.tree.leaves, pairs), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


def test_a_step_that_is_skipped_changes_neither_half():
    run = start(halves())
    before = jax.tree.map(np.array, (run.state.master, run.state.params))
    batch = make_batch(0)
    batch["weights"][0, 0] = np.nan
    state, metrics = run.step(run.state, batch)
    assert metrics["skipped_steps"] == 1
    after = state.master, state.params
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, after), before)


def test_models_of_the_users_are_halved_too(monkeypatch):
    batch = {"x": np.ones((16, 24), np.float32), "y": np.ones((16, 1), np.float32)}

    def loss_fn(model, batch, key):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    def trained():
        zero = {"stage": 3, "min_shard_elements": 0, "offload": "pinned_host"}
        run = zjax.initialize(
            Perceptron(), optax.adam(1e-2), loss_fn, batch, {"zero": zero}
        )
        state = run.state
        for _ in range(4):
            state, _ = run.step(state, batch)
        return run, weights_of(state)

    run, found = trained()
    assert lower_halves(run)
    monkeypatch.setattr(plans, "_split", lambda row, in_use: row)
    other, expected = trained()
    assert not lower_halves(other)
    jax.tree.map(  # compilers may round products before they add them, or not
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7),
        found,
        expected,
    )


FORMS = [
    ("pinned_host", 2, "bfloat16"),
    ("nvme", 3, "bfloat16"),
    ("device", 1, "bfloat16"),
    ("pinned_host", 2, "float32"),
    ("nvme", 0, "bfloat16"),
]
"""Memory, ZeRO stage and type in use, as one checkpoint goes from each to the next."""


@pytest.mark.slow
def test_checkpoints_restore_whole_or_in_halves(tmp_path):
    """Fails if one half is restored without the other, or from another's place."""
    config = halves(model=dataclasses.replace(LLAMA, mlp_tiles=3))
    run = start(config)
    state, _ = train(run, 1)
    expected = weights_of(state)
    store = saved(run, state, tmp_path / "first")
    entries = collections.Counter(
        entry.dtype for entry in store.source().entries.values()
    )
    assert "int16" not in entries and "bfloat16" not in entries
    files = []
    for number, (place, stage, dtype) in enumerate(FORMS):
        paths = (str(tmp_path),) if place == NVME else ()
        config = make_config(
            place,
            stage,
            model=LLAMA,
            zero={"nvme_paths": paths},
            precision={"compute_dtype": dtype},
        )
        run = start(config)
        state, _ = store.restore(saved_rows(run.plan, run.config))
        state = with_params(state, run.plan)
        assert bool(lower_halves(run)) == (place != DEVICE and dtype == "bfloat16")
        store = saved(run, state, tmp_path / str(number))
        if number == 0:
            expected = joined_tiles(expected)
        jax.tree.map(cut_and_compare, weights_of(state), expected)
        export_safetensors(store, str(tmp_path / f"{number}.safetensors"))
        tensors = safetensors.numpy.load_file(tmp_path / f"{number}.safetensors")
        files.append({name: x.tobytes() for name, x in tensors.items()})
    assert all(file == files[0] for file in files)
    run.step(state, make_batch(1))


def joined_tiles(weights):
    """The weights of feed-forwards in tiles, as they are without."""
    tiles = list(weights["blocks"]["mlp"]["tiles"].values())
    dims = {"up": -1, "gate": -1, "down": -2}
    whole = {
        name: {"kernel": np.concatenate([tile[name]["kernel"] for tile in tiles], dim)}
        for name, dim in dims.items()
    }
    mlp = {k: x for k, x in weights["blocks"]["mlp"].items() if k != "tiles"} | whole
    return weights | {"blocks": weights["blocks"] | {"mlp": mlp}}


def cut_and_compare(found, expected):
    """Without the padding of either."""
    size = tuple(map(slice, map(min, found.shape, expected.shape)))
    np.testing.assert_array_equal(found[size], expected[size])


def saved(run, state, directory):
    store = Store(str(directory))
    rows = saved_rows(run.plan, run.config)
    store.save(1, saved_state(state, run.plan), rows, extra={})
    store.wait()
    return store


@pytest.mark.slow
def test_a_run_resumed_from_halves_is_the_run_that_saved(tmp_path):
    """Fails if a bit of either half is lost; tensors and stages split both."""
    settings = (
        "model.remat=full",
        "precision.compute_dtype=bfloat16",
        "zero.stage=3",
        "zero.offload=pinned_host",
        "zero.offload.parameter_memory=pinned_host",
        "mesh.tensor=2",
        "optimizer.schedule=constant",
    )
    whole = small_run.fit(tmp_path / "whole", *settings)
    assert whole.run.plan.splits_master
    small_run.fit(tmp_path / "parts", *settings, "num_steps=4")
    parts = small_run.fit(tmp_path / "parts", *settings)
    trees = [
        (weights_of(x.state), in_memory(x.state.opt_state)) for x in (whole, parts)
    ]
    jax.tree.map(np.testing.assert_array_equal, *trees)
    losses = [small_run.losses(tmp_path / name) for name in ("whole", "parts")]
    assert losses[0] == losses[1]


def test_weights_of_a_file_start_both_halves(tmp_path):
    first = start(make_config("device"))
    path = tmp_path / "model.safetensors"
    export_safetensors(saved(first, first.state, tmp_path / "run"), str(path))
    checkpoint = schema.Checkpoint(init_from=str(path))
    config = dataclasses.replace(halves(model=GPT), checkpoint=checkpoint)
    run = start(dataclasses.replace(config, seed=5))
    jax.tree.map(cut_and_compare, weights_of(run.state), weights_of(first.state))
