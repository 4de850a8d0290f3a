"""Smaller moments and experts on a GPU: no float32 copy during the update."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zjax
from tests.support import runs
from tests.support.gpu import NEEDS_GPU
from zjax.optim.build import make_optimizer
from zjax.run.batch import abstract_batch
from zjax.settings import schema
from zjax.sharding import memory
from zjax.typing import Loss, Model

pytestmark = NEEDS_GPU

WIDTH, NUM_LAYERS = 1024, 16
NUM_PARAMS = NUM_LAYERS * WIDTH**2


def make_model():
    def init(key):
        keys = jax.random.split(key, NUM_LAYERS)
        return {
            f"layer_{i}": jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5
            for i, k in enumerate(keys)
        }, {}

    def loss(params, model_state, batch, key):
        x = batch["x"]
        for matrix in params.values():
            x = jnp.tanh(x @ matrix)
        return Loss(jnp.mean((x - 1) ** 2), jnp.float32(1), model_state, {})

    return Model(
        init=init,
        loss=loss,
        bind=lambda params, model_state: None,
        logical=lambda params: dict.fromkeys(params, (None, None)),
    )


def make_run(dtype):
    optimizer = schema.Optimizer(
        rule=schema.Adamw(moment_dtype=dtype),
        schedule=schema.Cosine(num_warmup_steps=0),
        peak_learning_rate=0.001,
    )
    model = make_model()
    tx = make_optimizer(runs.make_config(2, optimizer=optimizer), model)
    return runs.make_small_run(
        tx, 2, model=model, optimizer=optimizer, num_devices=jax.device_count()
    )


def make_batch():
    return {"x": np.ones((32, WIDTH), np.float32)}


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_update_needs_no_more_memory_than_that_of_float32(dtype):
    """Fails if all moments are unpacked at once: 8 bytes for each parameter."""
    temporary = {}
    for each in ("float32", dtype):
        run = make_run(each)
        batch = run.step.place_batch(make_batch())
        with jax.set_mesh(run.mesh):
            grads, loss = run.step.programs["gradients"](run.state, batch)
            update = run.step.programs["update"].lower(run.state, grads, loss, batch)
        temporary[each] = update.compile().memory_analysis().temp_size_in_bytes
    here = NUM_PARAMS / memory.num_zero_shares(run.plan)
    assert temporary[dtype] <= temporary["float32"] + 2 * here


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_losses_are_those_of_float32(dtype):
    losses = {}
    for each in ("float32", dtype):
        run = make_run(each)
        state, own = run.state, []
        for _ in range(20):
            state, metrics = run.step(state, make_batch())
            own.append(float(metrics["loss"]))
        losses[each] = own
    assert losses["float32"][-1] < 0.5 * losses["float32"][0]
    np.testing.assert_allclose(losses[dtype][:5], losses["float32"][:5], rtol=0.02)
    assert losses[dtype][-1] < 0.5 * losses[dtype][0]


SETTINGS = {
    "mesh": {"data": 1},
    "microbatch_size": 1,
    "num_microbatches": 2,
    "global_batch_size": 0,
    "precision": {"grad_sum_dtype": "bfloat16"},
    "model": {
        "num_layers": 4,
        "embed_size": 512,
        "num_heads": 8,
        "max_length": 128,
        "moe": {"every": 2, "num_experts": 32},
    },
}


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_update_of_experts_has_no_copy_in_float32(dtype):
    config = zjax.load_config(SETTINGS, {"optimizer.rule.moment_dtype": dtype})
    model = zjax.make_model(config)
    tx = zjax.make_optimizer(config, model)
    run = zjax.make_run(config, model, tx, devices=jax.devices()[:1])
    batch = abstract_batch(config, run.plan)
    with jax.set_mesh(run.mesh):
        grads, loss = jax.eval_shape(run.step.programs["gradients"], run.state, batch)
        update = run.step.programs["update"].lower(run.state, grads, loss, batch)
    num_params = sum(math.prod(x.shape) for x in jax.tree.leaves(grads))
    assert num_params > 140e6
    temporary = update.compile().memory_analysis().temp_size_in_bytes
    assert temporary < 0.5 * num_params
