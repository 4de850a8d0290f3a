"""Flax models as other people write them: ZeRO-3 on eight devices equals one device."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from zjax.run.initialize import initialize

WIDTH, BATCH, LENGTH = 8, 8, 4
LECUN = nn.initializers.lecun_normal()


def make_batch():
    x, y = np.random.default_rng(0).normal(size=(2, BATCH, LENGTH, WIDTH))
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def mean_square(model, batch, key):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


class Attention(nn.Module):
    """Names of T5X, of meshes of other programs and of several axes for one dim."""

    @nn.compact
    def __call__(self, x):
        named = nn.with_partitioning
        x = nn.MultiHeadDotProductAttention(
            num_heads=2,
            kernel_init=named(LECUN, ("embed", "heads", "kv")),
            bias_init=named(nn.initializers.zeros, ("kv",)),
        )(x)
        x = nn.DenseGeneral(
            (2, WIDTH), kernel_init=named(LECUN, (("data", "fsdp"), None, "tp"))
        )(x)
        logical = nn.with_logical_partitioning(LECUN, ("mlp", "embed"))
        return nn.Dense(WIDTH, kernel_init=logical)(x.reshape(*x.shape[:-2], -1))


class NnxAttention(nnx.Module):
    def __init__(self, rngs):
        named = nnx.with_partitioning
        self.attention = nnx.MultiHeadAttention(
            *(2, WIDTH),
            kernel_init=named(LECUN, ("embed", "heads", "kv")),
            decode=False,
            rngs=rngs,
        )
        self.out = nnx.LinearGeneral(
            *(WIDTH, (2, WIDTH)),
            kernel_init=named(LECUN, jax.P(("data", "fsdp"), None, "tp")),
            rngs=rngs,
        )

    def __call__(self, x):
        return jnp.sum(self.out(self.attention(x)), axis=-2)


def plain_init(key):
    return Attention().init(key, jnp.zeros((1, LENGTH, WIDTH)))


def penalised(model, batch, key):
    error = mean_square(model, batch, key)
    return error + 0.1 * sum(jnp.sum(w**2) for w in jax.tree.leaves(model.params))


class Block(nn.Module):
    """Dropout as an attribute, and names that the loop over layers adds to."""

    dropout: nn.Module = nn.Dropout(0.1, deterministic=False)

    @nn.compact
    def __call__(self, x, _):
        kernel_init = nn.with_partitioning(LECUN, ("fsdp", "tp"))
        x = x + self.dropout(nn.Dense(WIDTH, kernel_init=kernel_init)(x))
        return x, None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.RNN(nn.SimpleCell(WIDTH))(x)
        return nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=2,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )()(x, None)[0]


class NnxNormed(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.layers[1](self.norm(nnx.relu(self.layers[0](x))))


def decay_matrices():
    state = nnx.state(NnxNormed(nnx.Rngs(0)), nnx.Param)
    mask = jax.tree.map(lambda x: x.ndim > 1, state)
    return optax.chain(optax.add_decayed_weights(0.1, mask=mask), optax.sgd(0.1))


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(WIDTH, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(WIDTH)(nn.Dropout(0.1, deterministic=not train)(nn.relu(x)))


def mean_square_of_mode(model, batch, key):
    return jnp.mean((model(batch["x"], model.train) - batch["y"]) ** 2)


def adam():
    return optax.adam(0.01)


def train(model, loss_fn, stage, num_devices, tx, *, evaluates=False):
    config = {"zero.stage": stage, "zero.min_shard_elements": 1}
    config["precision.compute_dtype"] = "float32"
    devices = jax.devices()[:num_devices]
    run = initialize(model, tx, loss_fn, make_batch(), config, devices=devices)
    state, losses = run.state, []
    for _ in range(3):
        state, metrics = run.step(state, make_batch())
        losses.append(float(metrics["loss"]))
    if evaluates:
        losses.append(float(run.evaluate(state, make_batch())["loss"]))
    return losses


@pytest.mark.parametrize(
    ("model", "loss_fn", "make_tx"),
    [
        pytest.param(Attention(), mean_square, adam, id="linen-names"),
        pytest.param(NnxAttention, mean_square, adam, id="nnx-names"),
        pytest.param((plain_init, Attention().apply), mean_square, adam, id="plain"),
        pytest.param(nn.Dense(WIDTH), penalised, adam, id="linen-penalty"),
        pytest.param(Scanned(), mean_square, adam, id="linen-loop-and-dropout"),
        pytest.param(NnxNormed, mean_square, decay_matrices, id="nnx-mask-of-state"),
    ],
)
def test_zero_3_on_eight_devices_equals_one(model, loss_fn, make_tx):
    has_statistics = {"evaluates": model is NnxNormed}
    losses = train(model, loss_fn, 3, 8, make_tx(), **has_statistics)
    expected = train(model, loss_fn, 0, 1, make_tx(), **has_statistics)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize(
    "option",
    [
        pytest.param(("jax_numpy_dtype_promotion", "strict"), id="strict"),
        pytest.param(("jax_enable_x64", True), id="x64"),
    ],
)
def test_options_of_jax_leave_zero_3_equal_to_one_device(option):
    """Fails if what is not the user's code is held to the user's strictness."""
    name, value = option
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        tx = optax.adamw(optax.cosine_decay_schedule(0.02, 10))
        losses = train(Normed(), mean_square_of_mode, 3, 8, tx)
        expected = train(Normed(), mean_square_of_mode, 0, 1, tx)
    finally:
        jax.config.update(name, before)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses[1] < losses[0]


def test_strict_promotion_holds_in_the_loss_of_a_user():
    def mixed(model, batch, key):
        return jnp.mean(model(batch["x"])) + jnp.sum(jnp.arange(3) * jnp.ones(3))

    with jax.numpy_dtype_promotion("strict"), pytest.raises(ValueError, match="strict"):
        train(nn.Dense(WIDTH), mixed, 3, 8, adam())
