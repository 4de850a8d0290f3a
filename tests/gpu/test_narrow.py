"""Products of codes on the GPU: values by any number of rows, and float8 as float8."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.decode.test_product import fused
from tests.support.gpu import NEEDS_HOPPER
from zjax.ops import narrow

pytestmark = NEEDS_HOPPER
KINDS = {"int8": 1e-2, "int4": 1e-2, "float8": 0.08}
"""Error over the largest result; float8 also rounds the rows."""


def make_case(kind, rows, depth=4096, columns=1024):
    keys = jax.random.split(jax.random.key(rows), 3)
    draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    matrix = draw(keys[0], (depth, columns)) * jnp.bfloat16(depth**-0.5)
    codes = jax.jit(narrow.quantize, static_argnums=1)(matrix, kind)
    return draw(keys[1], (rows, depth)), codes, (draw(keys[2], (depth,)), 1e-5)


@pytest.mark.parametrize("rows", [1, 64, 100, 200, 600])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_dequantised_matrix(kind, rows):
    """Fails if the kernel, pieces of rows, or a wide product compute other numbers."""
    x, codes, norm = make_case(kind, rows)

    @jax.jit
    def run(x, codes, norm):
        settings = {"norm": (norm, 1e-5), "activation": "swiglu"}
        return narrow.multiply(x, codes, **settings)

    found = np.float32(run(x, codes, norm[0]))
    matrix = narrow.dequantize(codes).astype(jnp.float32)
    expected = fused(x, matrix, norm=norm, activation="swiglu")
    bound = KINDS[kind] * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, atol=bound)


@pytest.mark.parametrize("rows", [1, 64, 600])
def test_products_of_float8_are_computed_in_float8(rows):
    """Fails if XLA widens the codes, which would read and write them in 16 bits."""
    x, codes, _ = make_case("float8", rows)
    program = jax.jit(narrow.multiply).lower(x, codes).compile().as_text()
    assert "__cublas$lt$matmul$f8" in program
