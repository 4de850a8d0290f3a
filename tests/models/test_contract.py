"""Models and losses that break the contract, each with the exact words."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from zjax.errors import ModelError
from zjax.models import adapter

X = np.ones((2, 4), np.float32)
KINDS = (
    "a Linen module, an NNX module, a function `rngs -> nnx.Module`, a pair "
    "(init, apply) or (params, apply), or a dict of these"
)


def mean_square(view, batch, key):
    return jnp.mean(view(batch) ** 2)


class Dense(nnx.Module):
    def __init__(self, width, *, rngs):
        self.kernel = nnx.Param(jnp.ones((width, width)))

    def __call__(self, x):
        return x @ self.kernel


def make_dict(rngs):
    return {}


def init_nothing(key):
    return {}


def init_integers(key):
    return {"table": jnp.ones((2, 3), jnp.int32), "name": "w", "scale": jnp.ones(())}


class Empty(nn.Module):
    def __call__(self, x):
        return x


@pytest.mark.parametrize(
    ("model", "message"),
    [
        pytest.param(3, f"model='int' is not a model; use {KINDS}", id="a-number"),
        pytest.param({}, f"model='dict' is not a model; use {KINDS}", id="empty-dict"),
        pytest.param(
            {"a": nn.Dense(1), "b": None},
            f"model.b='NoneType' is not a model; use {KINDS}",
            id="one-of-several",
        ),
        pytest.param(
            nn.Dense,
            "model='Dense' is a Linen class, not a module; pass Dense(...)",
            id="linen-class",
        ),
        pytest.param(
            Dense,
            "model='Dense' cannot be called with rngs alone (missing a required "
            "argument: 'width'); give the other arguments with functools.partial",
            id="nnx-class-with-arguments",
        ),
        pytest.param(
            lambda: Dense(4, rngs=nnx.Rngs(0)),
            "model='<lambda>' cannot be called with rngs alone (too many positional "
            "arguments); give the other arguments with functools.partial",
            id="factory-without-rngs",
        ),
        pytest.param(
            make_dict,
            "model='make_dict' returns dict, not an nnx.Module; return the module",
            id="factory-of-something-else",
        ),
        pytest.param(
            (init_nothing, lambda params, x: x),
            "model='tuple' has no parameters; give it layers, and use them in loss_fn",
            id="functions-without-parameters",
        ),
        pytest.param(
            Empty(),
            "model='Empty' has no parameters; give it layers, and use them in loss_fn",
            id="linen-without-parameters",
        ),
        pytest.param(
            (init_integers, lambda params, x: x),
            "name='str' is not floating-point; keep it in another collection than the "
            "parameters\n"
            "table='int32[2,3]' is not floating-point; keep it in another collection "
            "than the parameters",
            id="parameters-that-are-no-floats",
        ),
    ],
)
def test_models_that_cannot_be_adapted(model, message):
    with pytest.raises(ModelError) as error:
        adapter.adapt(model, mean_square, X)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("out", "message"),
    [
        pytest.param(
            None,
            "loss_fn(...)='NoneType' is neither a loss nor (loss, weight, metrics); "
            "return one of the two",
            id="nothing",
        ),
        pytest.param(
            (jnp.float32(1), {"a": 1}),
            "loss_fn(...)='(float32[], dict)' is neither a loss nor (loss, weight, "
            "metrics); return one of the two",
            id="a-pair",
        ),
        pytest.param(
            jnp.ones((2, 3)),
            "loss='float32[2,3]' is not a scalar; return its mean",
            id="a-loss-per-example",
        ),
        pytest.param(
            (jnp.ones(2), jnp.ones(2), {"accuracy": jnp.ones((3,), bool), "k": "v"}),
            "loss='float32[2]' is not a scalar; return its mean\n"
            "weight='float32[2]' is not a scalar; return its sum\n"
            "metrics/accuracy='bool[3]' is not a scalar; return its mean\n"
            "metrics/k='str' is not a scalar; return its mean",
            id="everything-wrong-at-once",
        ),
        pytest.param(
            jnp.int32(1),
            "loss='int32[]' is not floating-point; return a loss with a gradient",
            id="an-integer",
        ),
    ],
)
def test_losses_that_return_something_else(out, message):
    factory = functools.partial(Dense, 4)
    model = adapter.adapt(factory, lambda view, batch, key: out, X)
    params, model_state = model.init(jax.random.key(0))
    with pytest.raises(ModelError) as error:
        model.loss(params, model_state, X, jax.random.key(0))
    assert str(error.value) == message


class Restless(nnx.Module):
    def __init__(self, rngs):
        self.kernel = nnx.Param(jnp.ones((4, 4)))
        self.grows = nnx.Variable(jnp.zeros((1,)))
        self.turns = nnx.Variable(jnp.zeros((2,), jnp.int32))
        self.leaves = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.grows.set_value(jnp.zeros((2,)))
        self.turns.set_value(jnp.zeros((2,)))
        self.comes = nnx.Variable(jnp.zeros(()))
        del self.leaves
        return x @ self.kernel


def test_model_state_must_keep_its_form():
    model = adapter.adapt(Restless, mean_square, X)
    params, model_state = model.init(jax.random.key(0))
    with pytest.raises(ModelError) as error:
        model.loss(params, model_state, X, jax.random.key(0))
    remedy = "keep the shapes of the model state, and sow what is for one step only"
    assert str(error.value) == (
        f"model_state/grows='float32[2]' was float32[1] before loss_fn; {remedy}\n"
        f"model_state/leaves='float32[]' vanished in loss_fn; {remedy}\n"
        f"model_state/turns='float32[2]' was int32[2] before loss_fn; {remedy}\n"
        f"model_state/comes='float32[]' appeared in loss_fn; {remedy}"
    )
