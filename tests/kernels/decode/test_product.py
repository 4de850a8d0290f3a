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


BFLOAT16 = dict(dtype=jnp.bfloat16)
UNSUPPORTED = {
    "implementation=mosaic_gpu cannot run: it needs bfloat16 or float16 and the arrays "
    "are float32; cast them": ((2, 64), (64, 64), dict(dtype=jnp.float32)),
    "implementation=mosaic_gpu cannot run: it needs 1 to 64 rows and x has 65; use "
    "x @ weights": ((65, 64), (64, 64), BFLOAT16),
    "implementation=mosaic_gpu cannot run: it needs 1 to 64 rows and x has 0; use "
    "x @ weights": ((0, 64), (64, 64), BFLOAT16),
    "implementation=mosaic_gpu cannot run: it needs weights of multiples of 64, not "
    "(64, 96); pad them": ((2, 64), (64, 96), BFLOAT16),
    "implementation=mosaic_gpu cannot run: it needs weights of multiples of 64, not "
    "(80, 64); pad them": ((2, 80), (80, 64), BFLOAT16),
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
        "weights.shape=(5, 3) does not fit x of shape (2, 4); give 4 inputs\n"
        "weights.dtype=float32 is not the dtype of x, bfloat16; cast one"
    ):
        few_rows_matmul(x, weights)
    with value_error(
        "x.shape=(4,) does not have 2 dims; give [N, K]\n"
        "weights.shape=(1, 5, 3) does not have 2 dims; give [K, M]"
    ):
        few_rows_matmul(x[0], weights[None])
    with value_error("x.dtype=int32 is not of floats; cast both"):
        few_rows_matmul(jnp.ones((2, 5), jnp.int32), jnp.ones((5, 3), jnp.int32))


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
