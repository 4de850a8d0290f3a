"""A mixture of experts in a Flax model of the user's."""

import dataclasses
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zjax
from tests.reference import moe as reference
from tests.support.trees import assert_close
from zjax.errors import ConfigError
from zjax.models.mixture_settings import (
    activation_problems,
    input_problems,
    router_problems,
)
from zjax.moe.router import Router
from zjax.settings import schema
from zjax.sharding import mesh as meshes

WIDTH, EXPERTS, HIDDEN = 8, 4, 5
TOP_2 = Router(num_experts=EXPERTS, top_k=2)
LOSSES: dict[str, Any] = {"balance_loss": 0.1, "z_loss": 0.03}


def make_x(*shape):
    return jax.random.normal(jax.random.key(3), (*shape, WIDTH))


def make_nnx(router=TOP_2, **given):
    layer = zjax.nnx.MoE(WIDTH, router, HIDDEN, rngs=nnx.Rngs(0), **given)
    for number, name in enumerate(layer.names):
        param = getattr(layer, name)
        param[...] = jax.random.normal(jax.random.key(number), param.shape, param.dtype)
    return layer


def params_of(layer):
    return {name: getattr(layer, name)[...] for name in layer.names}


def make_linen(router=TOP_2, **given):
    module = zjax.linen.MoE(router, HIDDEN, **given)
    params = params_of(make_nnx(router, **given))
    return jax.jit(lambda *args: module.apply({"params": params}, *args))


def run(made, *args):
    """A module as one program."""
    if not isinstance(made, nnx.Module):
        return made(*args)
    return nnx.jit(lambda made, *args: made(*args))(made, *args)


FLAVOURS = pytest.mark.parametrize("make", [make_linen, make_nnx])


def loop(params, x):
    """Outputs of relu experts, token by token, and the weighted losses."""
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    tokens = np.float64(x).reshape(-1, WIDTH)
    logits = tokens @ p["router_kernel"]
    experts, weights, _ = reference.route(logits, 2)
    y = np.zeros_like(tokens)
    for token, choices in enumerate(experts):
        for expert, weight in zip(choices, weights[token], strict=True):
            hidden = tokens[token] @ p["up"][expert] + p["up_bias"][expert]
            out = np.maximum(hidden, 0) @ p["down"][expert] + p["down_bias"][expert]
            y[token] += weight * out
    squares = np.log(np.exp(logits).sum(1)) ** 2
    loss = 0.1 * reference.balance_loss(logits, experts[:, :1]) + 0.03 * squares.mean()
    return y.reshape(x.shape), loss


@FLAVOURS
@pytest.mark.parametrize("shape", [(), (2, 3, 2)])
def test_module_is_a_loop_over_tokens(make, shape):
    given = {"activation": "relu", "use_bias": True, **LOSSES}
    x = make_x(*shape)
    y, loss = run(make(**given), x)
    expected, expected_loss = loop(params_of(make_nnx(**given)), x)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)


def test_modules_are_equal_with_swiglu_biases_and_padding():
    given = {"use_bias": True, **LOSSES}
    x, counts = make_x(2, 5), jnp.array(np.arange(5) < [[5], [2]])
    found, expected = (run(make(**given), x, counts) for make in (make_linen, make_nnx))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    np.testing.assert_array_equal(found[0][1, 2:], 0)


@FLAVOURS
def test_dtypes_are_those_of_flax(make):
    x = make_x(2, 3)
    low = jnp.bfloat16
    assert run(make(param_dtype=low), x)[0].dtype == jnp.float32
    assert run(make(param_dtype=low), x.astype(low))[0].dtype == low
    y, loss = run(make(dtype=low), x)
    assert (y.dtype, loss.dtype) == (low, jnp.float32)


def test_noise_is_drawn_in_training_alone():
    router = dataclasses.replace(TOP_2, sampling="first")
    x = make_x(2, 9)
    layer, module = make_nnx(router), zjax.linen.MoE(router, HIDDEN)
    variables = {"params": params_of(layer)}

    def linen(seed, **given):
        rngs = {"dropout": jax.random.key(seed)}
        return module.apply(variables, x, rngs=rngs, **given)[0]

    assert not np.array_equal(layer(x)[0], layer(x)[0])
    assert not np.array_equal(linen(0), linen(1))
    layer.eval()
    quiet = module.apply(variables, x, deterministic=True)[0]
    np.testing.assert_array_equal(layer(x)[0], quiet)
    np.testing.assert_array_equal(linen(0, deterministic=True), quiet)


@FLAVOURS
def test_experts_choose_tokens(make):
    """Fails if evaluation takes the capacity of training."""
    router = Router(
        num_experts=EXPERTS,
        choice="experts",
        capacity_factor=4.0,
        eval_capacity_factor=1.0,
        min_capacity=1,
    )
    x = make_x(1, 8)
    given = {"activation": "relu", "deterministic": True}
    params = params_of(make_nnx(router, **given))
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    weights = reference.choose_tokens(np.float64(x[0]) @ p["router_kernel"], 2)
    hidden = np.maximum(np.einsum("tm,emf->tef", x[0], p["up"]), 0)
    expected = np.einsum("te,tef,efm->tm", weights, hidden, p["down"])
    y, loss = run(make(router, **given), x)
    np.testing.assert_allclose(y[0], expected, rtol=1e-4, atol=1e-4)
    assert float(loss) == 0


class Linen(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        x = flax.linen.Dense(WIDTH)(x)
        y, loss = zjax.linen.MoE(TOP_2, HIDDEN, balance_scope="sequence", **LOSSES)(x)
        return flax.linen.Dense(WIDTH)(x + y), loss


class NNX(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.moe = zjax.nnx.MoE(
            WIDTH, TOP_2, HIDDEN, balance_scope="sequence", rngs=rngs, **LOSSES
        )
        self.last = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        y, loss = self.moe(x)
        return self.last(x + y), loss


def squared_error(model, batch, key):
    y, loss = model(batch["x"])
    return jnp.mean((y - batch["y"]) ** 2) + loss


def train(model, num_devices, **mesh):
    config = {
        "precision": {"compute_dtype": "float32"},
        "zero": {"stage": 1, "min_shard_elements": 0},
        "mesh": mesh,
    }
    batch = {"x": np.array(make_x(16, 4)), "y": np.array(make_x(16, 4))[::-1]}
    devices = jax.devices()[:num_devices]
    run = zjax.initialize(
        model, optax.adam(1e-2), squared_error, batch, config, devices=devices
    )
    state, losses = run.state, []
    before = jax.tree.map(np.asarray, state.master)
    for _ in range(3):
        state, metrics = run.step(state, batch)
        losses.append(float(metrics["loss"]))
    return run, losses, before, jax.tree.map(np.asarray, state.master)


@pytest.mark.parametrize("model", [Linen, NNX])
def test_training_equals_one_device(model):
    """Fails if experts are not split over their axis, or the router does not move."""
    model = model() if model is Linen else model
    _, expected, before, params = train(model, 1)
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, params)
    assert all(jax.tree.leaves(moved))
    for mesh in ({}, {"expert": 2}):
        run, losses, _, found = train(model, 8, **mesh)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        assert_close(found, params, rtol=1e-3, atol=1e-5)
        specs = [row.spec for row in jax.tree.leaves(run.plan.compute)]
        assert sum("expert" in spec for spec in specs) == (2 if mesh else 0)


@FLAVOURS
@pytest.mark.parametrize("axis", ["sequence", "tensor"])
def test_sequences_that_a_mesh_splits_have_no_loss_of_their_own(make, axis):
    layer = make(balance_scope="sequence")
    mesh = meshes.make_mesh(schema.Mesh(data=4, **{axis: 2}))
    with jax.set_mesh(mesh), pytest.raises(ConfigError) as error:
        jax.jit(layer)(make_x(8, 4))
    assert str(error.value) == (
        f"balance_scope='sequence' cannot run on a mesh whose axes {axis} split the "
        "tokens of a sequence; use 'microbatch', or size 1"
    )


@FLAVOURS
@pytest.mark.parametrize(
    ("router", "given", "message"),
    [
        (
            {"top_k": 5},
            {},
            "top_k=5 is above the 4 experts to choose from; use at most 4",
        ),
        ({"num_experts": 0}, {}, "num_experts=0 is not a size; use 1 or more"),
        (
            {"min_capacity": 8},
            {},
            "min_capacity=8 has no effect with drop='none'; leave it at 4, or set drop",
        ),
        (
            {},
            {"jitter": 1.0},
            "jitter=1.0 is out of range; use 0 or more and less than 1",
        ),
    ],
)
def test_bad_arguments_are_named(make, router, given, message):
    with pytest.raises(ConfigError) as error:
        layer = make(dataclasses.replace(TOP_2, **router), **given)
        layer(make_x(2))
    assert str(error.value) == message


@FLAVOURS
def test_bad_inputs_are_named(make):
    with pytest.raises(ConfigError) as error:
        make()(make_x(2, 0), jnp.ones((2, 4), bool))
    assert str(error.value) == (
        "x.shape=(2, 0, 8) has no token; give one or more\n"
        "counts='bool[2, 4]' does not mark the tokens; give bool[2, 0]"
    )


@pytest.mark.parametrize(
    ("x", "counts", "message"),
    [
        (make_x(2), jnp.full(2, 2), "counts='int32[2]' does not mark the tokens; give"),
        (jnp.ones(()), None, "x.shape=() is not tokens of 8 channels; end it with"),
        (jnp.ones(7), None, "x.shape=(7,) is not tokens of 8 channels; end it with"),
    ],
)
def test_inputs_that_are_no_tokens_are_named(x, counts, message):
    """Fails if tokens are dropped where a mask of integers is even."""
    (problem,) = input_problems(x, counts, WIDTH)
    assert str(problem).startswith(message)


def test_settings_that_are_no_router_are_named():
    message = "router=4 is not a Router; give zjax.moe.router.Router(num_experts=8)"
    assert list(map(str, router_problems(4))) == [message]
    assert not list(router_problems(TOP_2))


def test_an_unknown_activation_is_named():
    message = "activation='tanh' is not an activation; use one of swiglu, "
    message += "clamped_swiglu, gelu, relu"
    assert list(map(str, activation_problems("tanh"))) == [message]
