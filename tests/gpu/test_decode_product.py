"""Products of few rows on the GPU against sums in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.gpu import NEEDS_HOPPER
from zjax_kernels import few_rows_matmul

pytestmark = NEEDS_HOPPER
SHAPES = [(4096, 4096), (1600, 4800), (11008, 4096), (4096, 22016), (64, 64)]
multiply = jax.jit(functools.partial(few_rows_matmul, implementation="mosaic_gpu"))


def make_case(rows, depth, columns, dtype):
    keys = jax.random.split(jax.random.key(rows))
    x = jax.random.normal(keys[0], (rows, depth), dtype)
    return x, jax.random.normal(keys[1], (depth, columns), dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rows", [1, 3, 8, 16, 40, 64])
@pytest.mark.parametrize(("depth", "columns"), SHAPES)
def test_kernel_multiplies_rows_by_columns(depth, columns, rows, dtype):
    x, weights = make_case(rows, depth, columns, dtype)
    found, again = multiply(x, weights), multiply(x, weights)
    np.testing.assert_array_equal(np.float32(found), np.float32(again))
    expected = np.float32(x) @ np.float32(weights)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(np.float32(found), expected, atol=5e-3 * scale)


def test_a_row_does_not_depend_on_other_rows():
    x, weights = make_case(8, 4096, 4096, jnp.bfloat16)
    found = np.float32(multiply(x, weights))
    others = np.float32(multiply(x.at[1:].set(jnp.nan), weights))
    np.testing.assert_array_equal(found[0], others[0])
    np.testing.assert_array_equal(found[:1], np.float32(multiply(x[:1], weights)))
