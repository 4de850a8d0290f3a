"""Every feature computes on its mesh, and in its memory, what one device computes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import features
from tests.support.trees import assert_close
from zjax.parallel import slots
from zjax.sharding import plan as plans
from zjax.storage.array import DiskArray


@pytest.fixture(autouse=True)
def _small_arrays_move_and_unwritten_slots_show(monkeypatch):
    """Whatever a stage reads before it was written spoils the results."""
    full = slots.full

    def spoiled(shape, dtype, value=0):
        return full(shape, dtype, jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else -1)

    monkeypatch.setattr(slots, "full", spoiled)
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 16)


def assert_acts(run, state):
    """Fails if an axis of the mesh splits no weight, or a memory holds none."""
    mesh, zero = run.mesh.shape, run.config.zero
    specs = [tuple(row.spec) for row in jax.tree.leaves(run.plan.master)]
    wanted = {axis for axis in ("pipeline", "expert", "tensor") if mesh[axis] > 1}
    wanted |= {"data"} if zero.stage and mesh["data"] > 1 else set()
    assert wanted <= {axis for spec in specs for axis in jax.tree.leaves(spec)}
    arrays = jax.tree.leaves(state.master)
    kinds = {
        "nvme" if isinstance(x, DiskArray) else x.sharding.memory_kind for x in arrays
    }
    assert (zero.offload.kind if zero.offload else "device") in kinds


def assert_as_on_one_device(model, settings):
    config = features.config_of(features.MODELS[model] + settings)
    run = features.start(config, features.num_devices(config))
    state, found = features.train(run)
    assert_acts(run, state)
    expected = features.on_one_device(model)
    if "bfloat16" in settings or model == "float8":
        # Each share of float8 has its own scale, which drops its own small numbers.
        rtol = 1e-2 if "bfloat16" in settings else 3e-3
        np.testing.assert_allclose(found.losses, expected.losses, rtol=rtol)
        return
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=5e-5)
    # Adam moves weights of tiny gradients by rounding: a share of a step of 1e-3.
    assert_close(found.weights, expected.weights, rtol=1e-4, atol=5e-5)


BY_HAND = [pytest.param(name, marks=pytest.mark.slow) for name in features.PAIRS]


@pytest.mark.parametrize("name", [*features.FEATURES, *BY_HAND])
def test_steps_are_those_of_one_device(name, tmp_path):
    """Fails for gradients, masks, keys or weights of another device, stage or layer."""
    model, settings = (features.FEATURES | features.PAIRS)[name]
    if "nvme" in settings:
        settings += f" zero.offload.nvme_paths=('{tmp_path}',)"
    assert_as_on_one_device(model, settings)


@pytest.mark.parametrize(
    ("model", "without"),
    [
        ("dropped", "llama"),
        ("two dropped adapters", "two adapted layers"),
        ("layerwise", "span"),
        ("clipped", "gpt"),
        ("frozen", "gpt"),
        ("frozen blocks", "gpt"),
    ],
)
def test_settings_change_what_one_device_computes(model, without):
    """Fails if both runs above leave out what they compare."""
    found, expected = map(features.on_one_device, (model, without))
    assert np.abs(found.losses - expected.losses).max() > 1e-3


MESHES = (
    "pipeline=2",
    "pipeline=4",
    "pipeline=2 mesh.tensor=4",
    "pipeline=2 mesh.tensor=2",
    "pipeline=4 mesh.tensor=2",
    "pipeline=2 mesh.sequence=2",
)
SCHEDULES = ("1f1b", "gpipe pipeline.recompute=False", "zb_h1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "stage", "number", "schedule"),
    [*itertools.product(MESHES, range(4), (1, 4), SCHEDULES)],
)
def test_grid_of_pipelines(mesh, stage, number, schedule):
    settings = f"mesh.{mesh} zero.stage={stage} num_microbatches={number} "
    assert_as_on_one_device("four layers", settings + f"pipeline={schedule}")


@pytest.mark.slow
def test_float16_takes_steps_and_writes_text_in_a_pipeline():
    """Fails if the passes of stages overflow at the first scale, or find no product."""
    settings = "mesh.pipeline=2 mesh.tensor=2 zero.stage=2 num_microbatches=4 "
    settings += features.APART + "precision.compute_dtype=float16"
    run = features.start(features.config_of(settings))
    state, metrics = run.step(run.state, features.make_batch(run.config, 0))
    assert metrics["skipped_steps"] == 0
    wanted = features.on_one_device("gpt").losses[0]
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-3)
    prompts = np.ones((2, 3), np.int32)
    assert run.generate(state, prompts, max_new_tokens=2).shape == (2, 5)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("dropped", "mesh.pipeline=2 mesh.data=2 num_microbatches=2"),
        ("llama", "mesh.sequence=2 mesh.tensor=2 zero.stage=3"),
        ("gpt", features.HOST + "mesh.data=2 zero.stage=2"),
    ],
    ids=["pipeline, dropout", "sequence", "host"],
)
def test_evaluation_is_a_step_without_dropout_and_update(model, settings):
    """Fails if evaluation drops anything, or reads other weights than training."""
    plain = model.replace("dropped", "llama")
    run, alone = (
        features.start(config, features.num_devices(config) if mesh else 1)
        for name, mesh in ((model, settings), (plain, ""))
        for config in [features.config_of(features.MODELS[name] + mesh)]
    )
    batch = features.make_batch(run.config, 0)
    found = run.evaluate(run.state, batch)["loss"]
    _, metrics = alone.step(alone.state, batch)
    np.testing.assert_allclose(found, metrics["loss"], rtol=1e-5)


def test_first_weights_are_drawn_alike_on_every_mesh():
    """Fails if a device, a stage or padding changes what is drawn."""
    model = features.MODELS["padded, adapted"]
    runs = [
        features.start(features.config_of(model + mesh), number, is_drawn=True)
        for number, mesh in ((1, ""), (8, "mesh.pipeline=2 mesh.tensor=4 zero.stage=3"))
    ]
    weights = [features.weights_of(run, run.state) for run in runs]
    assert_close(*weights, rtol=1e-5, atol=1e-8)
