"""In evaluation nothing is dropped, and what must be drawn is the same each time."""

import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zjax.models.adapter import adapt
from zjax.models.contract import evaluate_loss

BATCH = {"x": jnp.arange(24.0).reshape(4, 6) / 10}


class InAttribute(nn.Module):
    """Dropout that is told its mode where it is made."""

    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=False)(nn.Dense(6)(x))


class InField(nn.Module):
    deterministic: bool = False

    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5)(nn.Dense(6)(x), deterministic=self.deterministic)


class InSetup(nn.Module):
    train: bool = True

    def setup(self):
        self.dense = nn.Dense(6)
        self.norm = nn.BatchNorm(use_running_average=not self.train)
        self.dropout = nn.Dropout(0.5, deterministic=not self.train)

    def __call__(self, x):
        return self.norm(self.dropout(self.dense(x)))


class InModule(nn.Module):
    """A module that was made outside and given as an attribute."""

    dropout: nn.Module

    @nn.compact
    def __call__(self, x):
        return self.dropout(nn.Dense(6)(x))


class InArgument(nn.Module):
    @nn.compact
    def __call__(self, x, training):
        return nn.Dropout(0.5)(nn.Dense(6)(x), not training)


class InAttention(nn.Module):
    @nn.compact
    def __call__(self, x):
        attention = nn.MultiHeadDotProductAttention(
            num_heads=2, dropout_rate=0.5, deterministic=False
        )
        return attention(nn.Dense(6)(x)[None])[0]


def loss_fn(model, batch, key):
    given = {"training": True} if isinstance(model.module, InArgument) else {}
    return jnp.mean(model(batch["x"], **given) ** 2)


def without_dropout(module, params):
    """The loss where dropout does nothing, from Flax alone."""
    x = nn.Dense(6).apply({"params": params["Dense_0"]}, BATCH["x"])
    if isinstance(module, InAttention):
        attention = nn.MultiHeadDotProductAttention(num_heads=2)
        variables = {"params": params["MultiHeadDotProductAttention_0"]}
        x = attention.apply(variables, x[None])[0]
    return jnp.mean(x**2)


MODULES = [
    InAttribute(),
    InField(),
    InModule(nn.Dropout(0.5, deterministic=False)),
    InArgument(),
    InAttention(),
]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: type(module).__name__)
def test_dropout_of_a_linen_module_is_off_wherever_it_is_told(module):
    model = adapt(module, loss_fn, BATCH)
    params, state = model.init(jax.random.key(0))
    found = model.loss(params, state, BATCH, None).value
    np.testing.assert_allclose(found, without_dropout(module, params), rtol=1e-5)
    trained = [
        float(model.loss(params, state, BATCH, jax.random.key(seed)).value)
        for seed in (1, 2)
    ]
    assert trained[0] != trained[1]
    assert not getattr(module, "deterministic", False)  # the user's own is as it was


def test_batch_norm_reads_its_statistics_wherever_it_is_told():
    model = adapt(InSetup(), loss_fn, BATCH)
    params, state = model.init(jax.random.key(0))
    found = model.loss(params, state, BATCH, None)
    x = nn.Dense(6).apply({"params": params["dense"]}, BATCH["x"])
    wanted = jnp.mean((x / jnp.sqrt(1 + 1e-5)) ** 2)  # statistics of the start
    np.testing.assert_allclose(found.value, wanted, rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, found.model_state, state)


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x):
        noise = jax.random.normal(self.make_rng("noise"), x.shape)
        return nn.Dense(6)(x + noise)


def test_a_module_that_draws_does_so_in_evaluation_and_it_is_told(caplog):
    model = adapt(Noisy(), loss_fn, BATCH)
    params, state = model.init(jax.random.key(0))
    with caplog.at_level(logging.WARNING, logger="absl"):
        first, again = (model.loss(params, state, BATCH, None).value for _ in "ab")
    assert first == again
    assert 'evaluation draws the same each time: None needs PRNG for "noise"' in (
        caplog.text
    )


def denoise(model, batch, key):
    """The loss of a diffusion model, which has no use for a mode."""
    noise_key, time_key = jax.random.split(key)
    noise = jax.random.normal(noise_key, batch["x"].shape)
    time = jax.random.uniform(time_key, (len(batch["x"]), 1))
    return jnp.mean((model(batch["x"] * time + noise) - noise) ** 2)


def test_a_loss_that_needs_noise_gets_it_from_the_batch_and_it_is_told(caplog):
    model = adapt(nn.Dense(6), denoise, BATCH)
    params, state = model.init(jax.random.key(0))
    with caplog.at_level(logging.WARNING, logger="absl"):
        first, again = (model.loss(params, state, BATCH, None).value for _ in "ab")
    assert first == again
    assert "loss_fn draws from its key in evaluation too" in caplog.text
    other = {"x": BATCH["x"].at[-1, -1].add(1e-3)}
    assert abs(model.loss(params, state, other, None).value - first) > 1e-2


def test_an_error_of_a_loss_in_evaluation_is_its_own():
    def broken(model, batch, key):
        if key is None:
            raise TypeError("unsupported operand: 'NoneType' and 'int'")
        return len(None)

    with pytest.raises(TypeError, match="unsupported operand"):
        evaluate_loss(broken, lambda: None, BATCH)


def test_a_branch_for_evaluation_is_not_passed_over():
    """Fails if any error of it leads to the branch of training."""

    def broken(model, batch, key):
        if key is None:
            raise ValueError("metrics of evaluation")
        return 0.0

    with pytest.raises(ValueError, match="metrics of evaluation"):
        evaluate_loss(broken, lambda: None, BATCH)
