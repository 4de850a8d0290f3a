"""Each ZeRO stage must have its effect: these fail when a stage does nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import models, runs
from zjax.settings import schema
from zjax.sharding import memory
from zjax.typing import Loss, Model

N = 8
PSI = 2 * models.WIDTH * models.HIDDEN + 7
PADDED = PSI + 1  # the bias of 7 is stored as 8


@pytest.mark.parametrize(
    ("stage", "compute", "grad_sum", "kept"),
    [
        (0, 4 * PSI, 4 * PSI, PSI),
        (1, 4 * PSI, 4 * PSI, PADDED // N),
        (2, 4 * PSI, 4 * PADDED // N, PADDED // N),
        (3, 4 * PADDED // N, 4 * PADDED // N, PADDED // N),
    ],
)
def test_stage_keeps_the_share_it_promises(stage, compute, grad_sum, kept):
    """Fails if `extend_spec` returns its input, or a stage is taken for another."""
    run = runs.make_small_run(optax.adam(1e-2), stage)
    _, state = runs.train(run, 2)
    assert memory.tree_bytes(run.plan.compute) == compute
    assert memory.tree_bytes(run.plan.grad_sum) == grad_sum
    assert (
        runs.held_bytes(state.master) == memory.tree_bytes(run.plan.master) == 4 * kept
    )
    moments = state.opt_state[0]
    assert runs.held_bytes((moments.mu, moments.nu)) == 8 * kept
    assert runs.held_bytes(state) == 12 * kept + 3 * 4  # two counters and Adam's


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_leave_their_program_as_planned(stage):
    """Fails if the gradient constraint is dropped."""
    run = runs.make_small_run(optax.sgd(1e-2), stage, num_microbatches=2)
    batch = run.step.place_batch(models.make_batch())
    grads, _ = run.step.programs["gradients"](run.state, batch)
    expected = 2 * 4 * models.WIDTH * models.HIDDEN // (N if stage >= 2 else 1)
    assert runs.held_bytes({name: grads[name] for name in ("up", "down")}) == expected


def layered_model(num_layers=8, width=256):
    """Equal square layers in a scan, whose gradient sum dwarfs the activations."""

    def loss(params, model_state, batch, key):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        out, _ = jax.lax.scan(layer, batch["x"], params["w"])
        return Loss(jnp.mean(out**2), jnp.float32(1), model_state, {})

    return Model(
        init=lambda key: (
            {"w": jax.random.normal(key, (num_layers, width, width))},
            {},
        ),
        loss=loss,
        bind=lambda params, model_state: None,
        logical=lambda params: {"w": ("layers", "embed", "mlp")},
    )


def temporary_bytes(stage, num_microbatches=4):
    step = runs.make_small_step(
        optax.adam(1e-3),
        stage,
        model=layered_model(),
        num_microbatches=num_microbatches,
    )
    batch = {"x": jax.ShapeDtypeStruct((64, 256), jnp.float32)}
    return step.compile(batch).memory_analysis().temp_size_in_bytes


def test_stage_2_keeps_only_a_share_of_the_gradient_sum():
    """Fails if the placement of the accumulated gradient is dropped."""
    whole = 4 * 8 * 256 * 256
    saved = temporary_bytes(1) - temporary_bytes(2)
    assert saved >= whole * (1 - 1 / N)


def test_stage_3_keeps_only_a_share_of_the_parameters():
    """Fails if stage 3 gathers all layers before the first."""
    steps = (
        runs.make_small_step(optax.sgd(1e-3), stage, model=layered_model())
        for stage in (2, 3)
    )
    batch = {"x": jax.ShapeDtypeStruct((64, 256), jnp.float32)}
    used = [x.compile(batch).memory_analysis().temp_size_in_bytes for x in steps]
    assert used[0] - used[1] >= 4 * 8 * 256 * 256 * (1 - 2 / N)


def test_hybrid_sharding_splits_within_a_replica_and_copies_across():
    """Fails if `replica` is taken for one of the ZeRO axes, or for nothing."""
    mesh = schema.Mesh(replica=2, data=4)
    run = runs.make_small_run(optax.adam(1e-2), 3, mesh=mesh)
    up = run.state.master["up"]
    assert runs.held_bytes(up) == up.nbytes // 4
    losses, _ = runs.train(run, 3)
    alone, _ = runs.train(runs.make_small_run(optax.adam(1e-2), 0, num_devices=1), 3)
    np.testing.assert_allclose(losses, alone, rtol=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_state_is_donated(stage):
    """Fails if a step keeps its old state beside the new one."""
    run = runs.make_small_run(optax.adam(1e-3), stage, model=layered_model())
    batch = {"x": jax.ShapeDtypeStruct((64, 256), jnp.float32)}
    analysis = run.step.compile(batch).memory_analysis()
    assert analysis.alias_size_in_bytes >= runs.held_bytes(run.state)
    state = run.state
    run.step(state, {"x": np.ones((64, 256), np.float32)})
    assert state.master["w"].is_deleted()
