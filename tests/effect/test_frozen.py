"""Frozen parameters cost one copy in the compute dtype, and nothing else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors

from tests.effect.test_stages import layered_model
from tests.support import models, runs
from zjax.checkpoint.export import export_safetensors
from zjax.checkpoint.store import Store
from zjax.optim.build import make_optimizer
from zjax.replicas.state import saved_rows, saved_state
from zjax.run.build import make_run
from zjax.settings import schema
from zjax.sharding import memory

N = 8
MATRIX = models.WIDTH * models.HIDDEN
BFLOAT16 = schema.Precision(compute_dtype="bfloat16")


def frozen_run(stage, patterns=("up",), model=None, ema_decay=0.0, **settings):
    groups = tuple(
        schema.ParamGroup(pattern=pattern, learning_rate_scale=0.0)
        for pattern in patterns
    )
    optimizer = schema.Optimizer(
        schedule=schema.Cosine(num_warmup_steps=0), groups=groups, ema_decay=ema_decay
    )
    config = runs.make_config(
        stage,
        optimizer=optimizer,
        **{"precision": BFLOAT16} | settings,
    )
    model = model or models.make_mlp()
    return make_run(config, model, make_optimizer(config, model))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_frozen_matrix_has_one_copy_in_bfloat16(stage):
    """Fails if it keeps a master weight, a moment, or a gradient or its sum."""
    run = frozen_run(stage, num_microbatches=2)
    before = np.asarray(run.state.master["up"], np.float32)
    shares = {"state": N if stage else 1, "compute": N if stage == 3 else 1}
    _, state = runs.train(run, 2)
    assert state.master["up"].dtype == jnp.bfloat16
    assert runs.held_bytes(state.master["up"]) == 2 * MATRIX // shares["compute"]
    assert runs.held_bytes(state.master["down"]) == 4 * MATRIX // shares["state"]
    vectors = 3 * 4 * 8  # a bias of 7, and two moments
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert runs.held_bytes(moments) <= 8 * MATRIX // shares["state"] + vectors
    batch = run.step.place_batch(models.make_batch())
    grads, _ = run.step.programs["gradients"](state, batch)
    assert grads["up"] is None and grads["down"] is not None
    planned = memory.plan_bytes(run.plan)
    assert planned.gradients <= 4 * MATRIX // (N if stage >= 2 else 1) + vectors
    assert planned.optimizer <= 12 * MATRIX // shares["state"] + vectors
    np.testing.assert_array_equal(np.asarray(state.master["up"], np.float32), before)


@pytest.mark.parametrize("stage", [0, 3])
def test_averages_are_those_of_trained_weights(stage, tmp_path):
    """Fails if a frozen weight is averaged, or missing where averages are used."""
    float32 = schema.Precision(compute_dtype="float32")
    run = frozen_run(stage, ema_decay=0.9, precision=float32)
    _, state = runs.train(run, 3)
    assert state.ema["up"] is None
    share = N if stage else 1
    assert runs.held_bytes(jax.tree.leaves(state.ema)) <= 4 * MATRIX // share + 4 * 8
    planned = memory.tree_bytes(run.plan.ema)
    assert planned == runs.held_bytes(jax.tree.leaves(state.ema))
    params = jax.device_get(run.step.parameters(state))
    np.testing.assert_array_equal(params["up"], state.master["up"])
    np.testing.assert_array_equal(params["down"], state.ema["down"])
    assert np.abs(params["down"] - np.asarray(state.master["down"])).max() > 5e-5
    batch = models.make_batch(9)
    wanted = models.loss(params, {}, batch, None).value
    np.testing.assert_allclose(run.evaluate(state, batch)["loss"], wanted, rtol=1e-5)
    store = Store(str(tmp_path / "checkpoints"))
    rows = saved_rows(run.plan, run.config)
    store.save(3, saved_state(state, run.plan), rows, extra={})
    store.close()
    export_safetensors(store, str(tmp_path / "out.safetensors"), part="ema")
    jax.tree.map(
        np.testing.assert_array_equal,
        safetensors.load_file(tmp_path / "out.safetensors"),
        params,
    )


def temporary_bytes(patterns):
    """Of a step of a model with two equal stacks, in microbatches."""
    half, batch = layered_model(), {"x": jax.ShapeDtypeStruct((64, 256), jnp.float32)}

    def loss(params, *inputs):
        losses = [half.loss({"w": params[name]}, *inputs) for name in ("v", "w")]
        return losses[0]._replace(value=losses[0].value + losses[1].value)

    model = dataclasses.replace(
        half,
        init=lambda key: ({name: half.init(key)[0]["w"] for name in ("v", "w")}, {}),
        loss=loss,
        logical=lambda params: dict.fromkeys("vw", ("layers", "embed", "mlp")),
    )
    float32 = schema.Precision(compute_dtype="float32")
    settings = {"precision": float32, "num_microbatches": 4}
    run = frozen_run(0, patterns, model, **settings)
    return run.step.compile(batch).memory_analysis().temp_size_in_bytes


def test_step_holds_no_gradient_of_frozen_parameters():
    """Fails if a gradient is computed and dropped, or summed over microbatches."""
    saved = temporary_bytes(()) - temporary_bytes(("^v$",))
    assert saved >= 4 * 8 * 256 * 256
