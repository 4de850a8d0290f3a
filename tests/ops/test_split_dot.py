import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zjax.ops.matmul import split_dot

DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def make_operands(dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (96, 256), jnp.bfloat16)
    kernel = jax.random.normal(keys[1], (256, 5), dtype)
    return x, kernel, jax.random.normal(keys[2], (96, 5))


@jax.jit
def run(x, kernel, cotangent):
    product, pull = jax.vjp(split_dot, x, kernel)
    return product, *pull(cotangent)


@DTYPES
def test_products_and_gradients_are_those_of_wide_numbers(dtype):
    """Compiled, since a compiler could drop the terms that rounding leaves."""
    operands = make_operands(dtype)
    x, kernel, cotangent = map(np.float64, operands)
    product, x_cotangent, kernel_cotangent = run(*operands)
    assert (x_cotangent.dtype, kernel_cotangent.dtype) == (jnp.bfloat16, dtype)
    np.testing.assert_allclose(product, x @ kernel, rtol=1e-5, atol=2e-5)
    rounded = {"rtol": 2**-8, "atol": 1e-4}
    np.testing.assert_allclose(np.float64(x_cotangent), cotangent @ kernel.T, **rounded)
    exact = {"rtol": 1e-5, "atol": 2e-5} if dtype == "float32" else rounded
    np.testing.assert_allclose(np.float64(kernel_cotangent), x.T @ cotangent, **exact)


@DTYPES
def test_all_operands_are_bfloat16(dtype):
    """Fails if a product runs at the rate of float32."""
    text = run.lower(*make_operands(dtype)).as_text()
    products = re.findall(r"dot_general .*: \((.*)\) ->", text)
    assert len(products) == 3
    for operands in products:
        assert operands.count("xbf16>") == 2, operands
