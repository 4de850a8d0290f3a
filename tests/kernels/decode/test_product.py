"""Products of few rows: the reference against NumPy, and what is refused."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.refusals import value_error
from zjax_kernels import device, few_rows_matmul


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_reference_sums_in_float32(dtype):
    """Fails if a sum of many equal numbers stops to grow, as sums in 16 bits do."""
    x, weights = jnp.ones((2, 4096), dtype), jnp.ones((4096, 3), dtype)
    found = few_rows_matmul(x, weights)
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.float32(found), np.full((2, 3), 4096.0))


def test_reference_multiplies_rows_by_columns():
    rng = np.random.default_rng(0)
    x, weights = rng.normal(size=(3, 5)), rng.normal(size=(5, 4))
    found = few_rows_matmul(jnp.float32(x), jnp.float32(weights))
    expected = [[sum(row * column) for column in weights.T] for row in x]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def gelu(x):
    return x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


ACTIVATIONS = {
    "": lambda total: total,
    "gelu": gelu,
    "swiglu": lambda gate, up: gate * sigmoid(gate) * up,
    "geglu": lambda gate, up: gelu(gate) * up,
    "clamped_swiglu": lambda gate, up: (
        np.minimum(gate, 7)
        * sigmoid(1.702 * np.minimum(gate, 7))
        * (np.clip(up, -7, 7) + 1)
    ),
}


def fused(x, weights, *, norm=None, activation="", residual=None):
    """What the options mean, in NumPy."""
    x, weights = np.float64(x), np.float64(weights)
    if norm is not None:
        scale, eps = norm
        deviation = np.sqrt((x**2).mean(axis=1, keepdims=True) + eps)
        x = x / deviation * np.float64(scale)
    parts = np.split(x @ weights, 2 if "glu" in activation else 1, axis=1)
    total = ACTIVATIONS[activation](*parts)
    return total if residual is None else total + np.float64(residual)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_norm", [False, True])
def test_options_are_computed_in_float32(activation, with_norm):
    rng = np.random.default_rng(0)
    x, weights, scale, residual = (
        jnp.float32(rng.normal(size=shape) * 2)
        for shape in ((3, 8), (8, 6), 8, (3, 3 if "glu" in activation else 6))
    )
    settings = dict(
        norm=(scale, 0.1) if with_norm else None,
        activation=activation,
        residual=residual,
    )
    found = few_rows_matmul(x, weights, **settings)
    np.testing.assert_allclose(found, fused(x, weights, **settings), rtol=2e-4)


BFLOAT16 = dict(dtype=jnp.bfloat16)
UNSUPPORTED = {
    "implementation=mosaic_gpu cannot run: it needs bfloat16 or float16 and the arrays "
    "are float32; cast them": ((2, 64), (64, 64), dict(dtype=jnp.float32)),
    "implementation=mosaic_gpu cannot run: it needs 1 to 64 rows and x has 65; use "
    "x @ weights": ((65, 64), (64, 64), BFLOAT16),
    "implementation=mosaic_gpu cannot run: it needs 1 to 64 rows and x has 0; use "
    "x @ weights": ((0, 64), (64, 64), BFLOAT16),
    "implementation=mosaic_gpu cannot run: it needs inputs and outputs in "
    "multiples of 64, not 64 and 96; pad them": ((2, 64), (64, 96), BFLOAT16),
    "implementation=mosaic_gpu cannot run: it needs inputs and outputs in "
    "multiples of 64, not 80 and 64; pad them": ((2, 80), (80, 64), BFLOAT16),
}


@pytest.mark.parametrize("text", UNSUPPORTED)
def test_arrays_without_a_kernel_are_told(on_hopper, caplog, text):
    """`auto` takes the reference and logs the problem; `mosaic_gpu` refuses."""
    *shapes, settings = UNSUPPORTED[text]
    x, weights = (jnp.ones(shape, **settings) for shape in shapes)
    with value_error(f"{text}, or use implementation='reference'"):
        few_rows_matmul(x, weights, implementation="mosaic_gpu")
    device._log_choice.cache_clear()
    with caplog.at_level(logging.WARNING, "zjax_kernels"):
        found = few_rows_matmul(x, weights)
    problem = text.split("run: ")[1].split(";")[0]
    assert caplog.messages == [f"product of few rows: reference ({problem})"]
    np.testing.assert_array_equal(np.float32(found), shapes[0][1])


def test_arrays_that_do_not_fit_are_refused():
    x, weights = jnp.ones((2, 4), jnp.bfloat16), jnp.ones((5, 3), jnp.float32)
    with value_error(
        "weights.shape=(5, 3) does not fit x of shape (2, 4); give (4, 3)\n"
        "weights.dtype=float32 is not the dtype of x, bfloat16; cast one"
    ):
        few_rows_matmul(x, weights)
    with value_error(
        "x.shape=(4,) does not have 2 dims; give [N, K]\n"
        "weights.shape=(1, 5, 3) does not have 2 dims; give [K, M]"
    ):
        few_rows_matmul(x[0], weights[None])
    with value_error("x.dtype=int32 is not of floats; cast the arrays"):
        few_rows_matmul(jnp.ones((2, 5), jnp.int32), jnp.ones((5, 3), jnp.int32))


def test_options_that_do_not_fit_are_refused():
    x, weights, values = jnp.ones((2, 4)), jnp.ones((4, 3)), jnp.ones((4, 6))
    with value_error(
        "activation=silu is not an activation; use one of gelu, swiglu, geglu, "
        "clamped_swiglu, or none\n"
        "norm[1]=-1.0 is below 0; use 1e-5"
    ):
        few_rows_matmul(x, weights, activation="silu", norm=(x[0], -1.0))
    with value_error("weights.shape=(4, 3) has no value for each gate; give [K, 2 M]"):
        few_rows_matmul(x, weights, activation="swiglu")
    with value_error(
        "norm[0].shape=(2,) does not fit x of shape (2, 4); give (4,)\n"
        "residual.shape=(2, 6) does not fit x of shape (2, 4); give (2, 3)\n"
        "residual.dtype=bfloat16 is not the dtype of x, float32; cast one"
    ):
        few_rows_matmul(
            x,
            values,
            activation="geglu",
            norm=(jnp.ones(2), 1e-5),
            residual=jnp.ones((2, 6), jnp.bfloat16),
        )


def test_no_device_is_refused():
    x = jnp.ones((1, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU and this is cpu"):
        few_rows_matmul(x, jnp.ones((64, 64), x.dtype), implementation="mosaic_gpu")


def test_sharded_weights_run_anywhere():
    """Fails if the reference does not follow the sharding of output channels."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tensor",))
    spec = jax.sharding.PartitionSpec(None, "tensor")
    weights = jax.device_put(
        jnp.arange(8.0).reshape(2, 4), jax.sharding.NamedSharding(mesh, spec)
    )
    found = jax.jit(few_rows_matmul)(jnp.ones((1, 2)), weights)
    assert found.sharding.spec == spec
    np.testing.assert_array_equal(found, [[4.0, 6.0, 8.0, 10.0]])
