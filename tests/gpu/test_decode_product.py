"""Products of few rows on the GPU against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.decode.test_product import fused
from tests.support.gpu import NEEDS_HOPPER
from zjax_kernels import few_rows_matmul
from zjax_kernels.decode.product.reference import restored

pytestmark = NEEDS_HOPPER
SHAPES = [(4096, 4096), (1600, 4800), (11008, 4096), (4096, 22016), (64, 64)]
CODES = {
    "8 bits": dict(codes=jnp.int8),
    "8 bits by column": dict(codes=jnp.int8, normal=True, group=None),
    "4 bits": dict(codes=jnp.int4),
    "8 bits, all": dict(codes=jnp.int8, normal=True, activation="swiglu", adds=True),
    "4 bits, all": dict(
        codes=jnp.int4, normal=True, activation="geglu", adds=True, group=64
    ),
    "float8": dict(codes=jnp.float8_e4m3fn),
    "float8, all": dict(
        codes=jnp.float8_e4m3fn, normal=True, activation="swiglu", adds=True, group=64
    ),
}
OPTIONS = {
    "a norm": dict(normal=True),
    "gates": dict(activation="swiglu"),
    "a norm and gates": dict(normal=True, activation="geglu"),
    "a residual": dict(adds=True),
    "all": dict(normal=True, activation="clamped_swiglu", adds=True),
}


def make_case(
    rows,
    depth,
    columns,
    dtype=jnp.bfloat16,
    *,
    normal=False,
    activation="",
    adds=False,
    codes=None,
    group=128,
):
    keys = jax.random.split(jax.random.key(rows), 5)
    draw = functools.partial(jax.random.normal, dtype=dtype)
    outputs = columns // 2 if "glu" in activation else columns
    settings = dict(
        norm=(draw(keys[2], (depth,)), 0.1) if normal else None,
        activation=activation,
        residual=draw(keys[3], (rows, outputs)) if adds else None,
    )
    weights = draw(keys[1], (depth, columns)) * jnp.asarray(depth**-0.5, dtype)
    if codes is not None:
        is_float = jnp.issubdtype(codes, jnp.floating)
        last = 448 if is_float else int(jnp.iinfo(codes).max)
        shape = depth // (group or depth), columns
        weights = jax.random.randint(keys[1], (columns, depth), -last - 1, last + 1)
        weights = weights.astype(codes)
        settings["scales"] = jax.random.uniform(keys[4], shape) / last * depth**-0.5
    return draw(keys[0], (rows, depth)), weights, settings


def multiply(x, weights, settings):
    @jax.jit
    def run(x, weights):
        return few_rows_matmul(x, weights, implementation="mosaic_gpu", **settings)

    return np.float32(run(x, weights))


def assert_computed(x, weights, settings):
    """Compares with NumPy, and a call with another call."""
    found = multiply(x, weights, settings)
    np.testing.assert_array_equal(found, multiply(x, weights, settings))
    if jnp.issubdtype(weights.dtype, jnp.integer):
        weights = restored(weights, jnp.iinfo(weights.dtype).bits)
    expected = fused(x, weights.astype(jnp.float32), **settings)
    np.testing.assert_allclose(found, expected, atol=1e-2 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rows", [1, 3, 8, 16, 40, 64])
@pytest.mark.parametrize(("depth", "columns"), SHAPES)
def test_kernel_multiplies_rows_by_columns(depth, columns, rows, dtype):
    assert_computed(*make_case(rows, depth, columns, dtype))


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize(("depth", "columns"), [(4096, 4096), (1600, 8704), (256, 128)])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_fused(name, depth, columns, rows):
    """Also where programs of a cluster share a sum."""
    assert_computed(*make_case(rows, depth, columns, jnp.bfloat16, **OPTIONS[name]))


@pytest.mark.parametrize("rows", [1, 16, 64, 128])
@pytest.mark.parametrize(
    ("depth", "columns"), [(4096, 4096), (11008, 4096), (4096, 22016), (256, 128)]
)
@pytest.mark.parametrize("name", CODES)
def test_codes_are_widened(name, depth, columns, rows):
    assert_computed(*make_case(rows, depth, columns, **CODES[name]))


@pytest.mark.parametrize("normal", [False, True])
def test_a_row_does_not_depend_on_other_rows(normal):
    x, weights, settings = make_case(8, 4096, 4096, jnp.bfloat16, normal=normal)
    found = multiply(x, weights, settings)
    others = multiply(x.at[1:].set(jnp.nan), weights, settings)
    np.testing.assert_array_equal(found[0], others[0])
    np.testing.assert_array_equal(found[:1], multiply(x[:1], weights, settings))


@pytest.mark.parametrize("rows", [1, 16])
def test_early_kernels_compute_the_same(rows):
    """Fails if a kernel reads rows, or writes, before the last one has ended."""
    x, up, _ = make_case(rows, 4096, 8192)
    _, down, _ = make_case(rows, 8192, 4096)
    scale = jnp.ones(4096, x.dtype)

    @functools.partial(jax.jit, static_argnums=1)
    def run(x, early):
        for _ in range(20):
            settings = dict(implementation="mosaic_gpu", early=early)
            hidden = few_rows_matmul(x, up, norm=(scale, 0.1), **settings)
            x = few_rows_matmul(hidden, down, residual=x, **settings)
        return x

    expected = np.float32(run(x, False))
    for _ in range(5):
        np.testing.assert_array_equal(np.float32(run(x, True)), expected)
