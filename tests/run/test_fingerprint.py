"""A function is known by what it computes."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zjax.config import Config
from zjax.run.resume import fingerprint, fingerprint_functions
from zjax.typing import Loss, Model
from zjax_kernels import device, grouped_matmul

X = jnp.ones(3)
TABLE = np.arange(3.0, dtype=np.float32)


def make_model(init):
    return Model(
        init=lambda key: (init, {}),
        loss=lambda params, state, batch, key: Loss(X.sum(), X.sum(), {}, {}),
        bind=lambda params, state: None,
        logical=lambda params: None,
    )


def word_of(tx):
    model = make_model({"w": X})
    return fingerprint_functions(Config(), model, tx, compute_dtype=X.dtype)["tx"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(lambda x: x + 0.5, lambda x: x + 0.25, id="number"),
        pytest.param(jnp.sin, jnp.cos, id="operation"),
        pytest.param(lambda x: x * TABLE, lambda x: x * (TABLE + 1), id="table"),
        pytest.param(
            jax.jit(lambda x: x - 1.0), jax.jit(lambda x: x - 2.0), id="inner program"
        ),
        pytest.param(
            lambda x: jax.lax.scan(lambda c, y: (c * 2.0, y), x, X),
            lambda x: jax.lax.scan(lambda c, y: (c * 3.0, y), x, X),
            id="loop",
        ),
        pytest.param(lambda x: x[:1] - x[1:2], lambda x: x[1:2] - x[:1], id="order"),
    ],
)
def test_another_program_has_another_word(one, other):
    assert fingerprint(one, X) == fingerprint(lambda x: one(x), X)
    assert fingerprint(one, X) != fingerprint(other, X)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(optax.adam(1e-3), optax.adam(1.001e-3), id="learning rate"),
        pytest.param(optax.adam(1e-3), optax.adam(1e-3, b2=0.99), id="momentum"),
        pytest.param(
            optax.sgd(optax.cosine_decay_schedule(0.1, 100)),
            optax.sgd(optax.cosine_decay_schedule(0.1, 101)),
            id="schedule",
        ),
        pytest.param(
            optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
            optax.inject_hyperparams(optax.adam)(learning_rate=2e-3),
            id="rate in the state, which a checkpoint restores",
        ),
    ],
)
def test_other_settings_of_an_optimizer_are_seen(one, other):
    assert word_of(one) == word_of(one)
    assert word_of(one) != word_of(other)


def act(x):
    return jax.nn.gelu(jax.nn.relu(x)) @ x


def test_the_word_is_the_same_in_another_process():
    """Fails if addresses or the order of sets reach it."""
    program = (
        "import jax, jax.numpy as jnp\n"
        "from zjax.run.resume import fingerprint\n"
        "act = lambda x: jax.nn.gelu(jax.nn.relu(x)) @ x\n"
        "print(fingerprint(act, jnp.ones(3)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(sys.path), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == fingerprint(act, X)


def test_a_loss_is_traced_in_the_dtype_in_which_steps_call_it():
    """A kernel such as cuDNN's attention refuses float32."""
    traced = []

    def loss(params, state, batch, key):
        traced.append((params["w"].dtype, params["n"].dtype, batch["x"].dtype))
        return Loss(X.sum(), X.sum(), {}, {})

    model = dataclasses.replace(
        make_model({"w": X, "n": jnp.arange(3)}),
        loss=loss,
        inputs={"x": jax.ShapeDtypeStruct((2, 3), "float32")},
        cast=("x",),
    )
    assert fingerprint_functions(
        Config(), model, compute_dtype=jnp.bfloat16
    ).keys() == {"model"}
    assert traced == [("bfloat16", "int32", "bfloat16")]


@pytest.mark.parametrize("transpose", [False, True])
def test_kernels_for_gpus_have_a_word(transpose, monkeypatch):
    """Fails if no run with experts can be saved on a GPU."""
    monkeypatch.setattr(device, "first_device", lambda: ("cuda", (9, 0)))
    x, sizes = jnp.ones((256, 128), jnp.bfloat16), jnp.full(2, 128)
    weights = jnp.ones((2, 128, 128), jnp.bfloat16)

    def word(weights):
        def product(x):
            return grouped_matmul(x, weights, sizes, transpose=transpose).sum()

        return fingerprint(jax.grad(product), x)

    assert word(weights) == word(weights) != word(2 * weights)
