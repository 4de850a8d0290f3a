"""Experts that are stored on the host train, and write text, as on the devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import language, offload
from tests.support.trees import assert_close
from zjax.models.generate import generate
from zjax.settings import schema
from zjax.sharding.placement import pad
from zjax.sharding.program_plan import staged_plan
from zjax.storage.move import store

MOE = schema.TokenChoice(num_experts=4, every=2, first_dense=1, top_k=2, num_shared=1)
MODEL = dataclasses.replace(language.GPT, remat="full", num_layers=3, moe=MOE)
"""A dense block, then one of two layers."""


def make_run(memory, num_devices=2, mesh=None, *, dtype="float32", **zero):
    config = offload.make_config(
        memory,
        2,
        model=MODEL,
        zero=zero,
        mesh=mesh or schema.Mesh(),
        precision={"compute_dtype": dtype},
    )
    return offload.start(config, optax.sgd(0.5, 0.9), jax.devices()[:num_devices])


def train(run):
    state, losses = run.state, []
    for step in range(3):
        batch = offload.make_batch(step)
        batch["weights"] = np.ones_like(batch["weights"])
        state, metrics = run.step(state, batch)
        losses.append([float(metrics[name]) for name in ("loss", "max_load")])
    return losses, offload.weights_of(state)


@pytest.mark.parametrize(
    ("num_devices", "mesh"),
    [
        pytest.param(2, schema.Mesh(), marks=pytest.mark.slow),
        pytest.param(4, schema.Mesh(data=2, expert=2), marks=pytest.mark.slow),
        (8, schema.Mesh(data=2, expert=2, tensor=2)),  # E+Z-Off+M
    ],
    ids=["data", "expert", "expert-tensor"],
)
def test_steps_are_those_of_experts_on_the_devices(num_devices, mesh):
    """Fails if blocks of two kinds share a program, or a loss of a router is lost."""
    run = make_run("pinned_host", num_devices, mesh)
    kinds = offload.memories(run.state.master["blocks"])
    assert kinds == {"pinned_host"}
    losses, params = train(run)
    expected, expected_params = train(make_run("device", num_devices, mesh))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_close(params, expected_params, rtol=1e-4, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "dtype"), [("nvme", "float32"), ("pinned_host", "float16")]
)
def test_split_experts_of_slow_memories(memory, dtype, tmp_path):
    """On disks, and with a loss scale."""
    disks = {"nvme_paths": (str(tmp_path),)} if memory == "nvme" else {}
    mesh = schema.Mesh(data=2, expert=2)
    found, params = train(make_run(memory, 4, mesh, dtype=dtype, **disks))
    expected, expected_params = train(make_run("device", 4, mesh, dtype=dtype))
    rtol = 1e-5 if dtype == "float32" else 2e-3
    np.testing.assert_allclose(found, expected, rtol=rtol)
    assert_close(params, expected_params, rtol=10 * rtol, atol=10 * rtol)


def test_text_is_that_of_all_blocks_at_once():
    run = make_run("pinned_host", parameter_memory="pinned_host")
    rng = np.random.default_rng(1)

    def fill(row):
        x = ("scale" in row.path) + 0.3 * rng.normal(size=row.shape)
        return jax.device_put(pad(jnp.asarray(x, row.dtype), row), row.stored)

    params = jax.tree.map(fill, staged_plan(run.plan).compute)
    params = store(params, run.plan.compute)
    state = dataclasses.replace(run.state, params=params)
    tokens = language.make_text(MODEL, rows=2, length=4)["tokens"]
    found = run.generate(state, tokens, max_new_tokens=5)
    expected = generate(run.bind(state), tokens, max_new_tokens=5)
    np.testing.assert_array_equal(found, expected)
