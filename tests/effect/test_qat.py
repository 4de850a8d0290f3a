"""A tiny model that learns on rounded matrices loses less than one that is rounded."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.parity import test_lora as lora
from tests.parity.test_qat import make_config

STEPS = 60
RULES = [{"weights": "int3", "group_size": 0}]


def make_batch():
    """Rows that a model learns by heart."""
    tokens = np.random.default_rng(0).integers(0, 32, (8, 9)).astype(np.int32)
    return {
        "tokens": jnp.asarray(tokens[:, :-1]),
        "targets": jnp.asarray(tokens[:, 1:]),
    }


def learned(config, batch):
    """Parameters after some steps of Adam on one device, in one program."""
    model, tx = lora.make_model(config), optax.adam(0.02)
    params = lora.first_params(make_config(None))

    def step(carry, _):
        params, state = carry
        grads = jax.grad(lambda p: model.loss(p, {}, batch, None).value)(params)
        updates, state = tx.update(grads, state)
        return (optax.apply_updates(params, updates), state), None

    run = jax.jit(lambda carry: jax.lax.scan(step, carry, None, STEPS)[0][0])
    return run((params, tx.init(params)))


def test_learning_on_rounded_matrices_loses_less_than_rounding():
    """Fails if the forward pass of training is not the forward pass of the codes."""
    batch, rounded = make_batch(), make_config(RULES)
    model = lora.make_model(rounded)
    loss = jax.jit(lambda params: model.loss(params, {}, batch, None).value)
    plain_model = lora.make_model(make_config(None))
    plain = jax.jit(lambda params: plain_model.loss(params, {}, batch, None).value)
    params = learned(make_config(None), batch)
    gap = loss(params) - plain(params)
    assert gap > 0.02
    assert loss(learned(rounded, batch)) < plain(params) + 0.4 * gap
