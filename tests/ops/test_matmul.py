"""Products of float8 operands, and products in parts."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging

from tests.reference import float8 as reference
from tests.support.refusals import config_error
from zjax.ops import matmul
from zjax.ops.matmul import split_dot

FORMS = {
    "matrix": ((4, 16), (16, 3), 1, 1),
    "shares": ((8, 5, 16), (16, 12), 1, 4),
    "to-heads": ((8, 5, 16), (16, 4, 6), 1, 2),
    "from-heads": ((8, 5, 4, 6), (4, 6, 16), 2, 8),
}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def make_arrays(form, dtype=jnp.float32):
    """Magnitudes over many octaves, and other ones in the first row."""
    x_shape, kernel_shape, num_contracted, _ = form
    y_shape = x_shape[:-num_contracted] + kernel_shape[num_contracted:]
    rng = np.random.default_rng(0)
    x, kernel, dy = (
        rng.normal(size=shape) * np.exp2(rng.integers(-12, 2, size=shape))
        for shape in (x_shape, kernel_shape, y_shape)
    )
    x[0], dy = 300 * x[0], 1e-7 * dy
    return [jnp.asarray(array, dtype) for array in (x, kernel, dy)]


@functools.partial(jax.jit, static_argnums=(3, 4))
def product_and_gradients(x, kernel, dy, num_contracted, num_batch_shards):
    def product(x, kernel):
        return matmul.dot(x, kernel, num_contracted, num_batch_shards=num_batch_shards)

    y, pull = jax.vjp(product, x, kernel)
    return y, *pull(dy)


@each_form
@pytest.mark.parametrize(("dtype", "digits"), [("float32", 22), ("bfloat16", 7)])
def test_product_and_gradients_equal_numpy(form, dtype, digits):
    arrays = make_arrays(form, dtype)
    expected = reference.product_and_gradients(*arrays, *form[2:])
    for got, exact in zip(
        product_and_gradients(*arrays, *form[2:]), expected, strict=True
    ):
        assert got.dtype == dtype
        error = np.abs(np.asarray(got, np.float64) - exact).max()
        assert error <= 2.0**-digits * np.abs(exact).max()


@pytest.mark.parametrize("largest", [448.0, 383.9, 384.0, 1.0, 1e-30, 3e37])
def test_no_magnitude_overflows(largest):
    x = jnp.array([[largest, largest / 3]])
    eye = jnp.eye(2)
    np.testing.assert_allclose(matmul.dot(x, eye), x, rtol=2**-4)
    _, dx, _ = product_and_gradients(eye, eye, jnp.tile(x, (2, 1)), 1, 1)
    np.testing.assert_allclose(dx, jnp.tile(x, (2, 1)), rtol=2**-3)


def test_a_power_of_two_changes_no_digit():
    arrays = make_arrays(FORMS["shares"])
    plain = product_and_gradients(*arrays, 1, 4)
    scaled = product_and_gradients(*(a * 2.0**9 for a in arrays), 1, 4)
    for got, expected in zip(scaled, plain, strict=True):
        np.testing.assert_array_equal(got, expected * 2.0**18)


def test_shares_do_not_see_each_other():
    """Fails if one scale serves the whole batch: devices would have to agree on it."""
    x, kernel, dy = make_arrays(FORMS["shares"])
    together = product_and_gradients(x, kernel, dy, 1, 4)[:2]
    alone = product_and_gradients(x[2:4], kernel, dy[2:4], 1, 1)[:2]
    for all_rows, rows in zip(together, alone, strict=True):
        np.testing.assert_array_equal(all_rows[2:4], rows)
    mixed = product_and_gradients(x, kernel, dy, 1, 1)[0]
    assert not np.array_equal(mixed[2:4], together[0][2:4])


def test_zeros_stay_zeros():
    arrays = [jnp.zeros_like(a) for a in make_arrays(FORMS["matrix"])]
    for got in product_and_gradients(*arrays, 1, 1):
        np.testing.assert_array_equal(got, np.zeros(got.shape))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", range(3))
def test_what_is_not_finite_stays_so(bad, which):
    """A step with such a gradient is to be skipped: no scale may hide it."""
    arrays = make_arrays(FORMS["matrix"])
    arrays[which] = arrays[which].at[0, 0].set(bad)
    y, dx, dkernel = product_and_gradients(*arrays, 1, 1)
    reached = {0: (y, dkernel), 1: (y, dx), 2: (dx, dkernel)}[which]
    assert not any(np.isfinite(array).all() for array in reached)


@each_form
def test_three_products_take_float8_and_nothing_wider(form):
    arrays = make_arrays(form, jnp.bfloat16)
    text = product_and_gradients.lower(*arrays, *form[2:]).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    operands = [line.rpartition(": (")[2].partition(") ->")[0] for line in products]
    kinds = [
        [kind for kind in ("f8E4M3FN", "f8E5M2") if kind in operand]
        for pair in operands
        for operand in pair.split(", ")
    ]
    assert len(products) == 3
    assert sorted(kinds) == [["f8E4M3FN"]] * 4 + [["f8E5M2"]] * 2


def test_the_backward_pass_keeps_the_input_in_float8():
    x, kernel, _ = make_arrays(FORMS["shares"], jnp.bfloat16)
    product = functools.partial(matmul.dot, num_batch_shards=4)
    _, pull = jax.vjp(product, x, kernel)
    kept = {leaf.dtype.name: leaf.size for leaf in jax.tree.leaves(pull)}
    assert kept == {"float8_e4m3fn": x.size, "float32": 4, "bfloat16": kernel.size}


def make_gpu(capability, version="PJRT C API\ncuda 13000"):
    client = types.SimpleNamespace(platform_version=version)
    return types.SimpleNamespace(
        platform="gpu", client=client, compute_capability=capability
    )


@pytest.mark.parametrize("capability", ["8.9", "9.0", "10.0", "12.1"])
def test_gpus_that_multiply_float8_pass(capability):
    matmul.check_device(make_gpu(capability))


@pytest.mark.parametrize("capability", ["7.5", "8.0", "8.6"])
def test_older_gpus_are_refused(capability):
    with config_error(
        "precision.matmul_dtype='float8' needs compute capability 8.9 and this GPU has "
        f"{capability}; use 'compute'"
    ):
        matmul.check_device(make_gpu(capability))


def test_emulation_is_said_once(monkeypatch):
    said = []
    monkeypatch.setattr(
        logging, "warning", lambda text, *args: said.append(text % args)
    )
    matmul._log_emulation.cache_clear()
    for device in (jax.devices()[0], jax.devices()[1], make_gpu("gfx942", "rocm 7")):
        matmul.check_device(device)
    assert said == [
        "float8: emulated, as cpu does not multiply it: slow",
        "float8: emulated, as gpu does not multiply it: slow",
    ]


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
