"""Sums of gradients that products of 16 bits add to without rounding."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zjax.parallel.sums import add, add_in_products, add_to_chunk

HEADS, SIZE, WIDTH, TOKENS = 2, 3, 5, 64


def block(params, x):
    """Has matrices in the forms in which models have them, and what is no matrix."""
    heads = jnp.einsum("tw,wns->tns", x, params["query"])
    x = x + jnp.einsum("tns,nsw->tw", jnp.sin(heads), params["out"])
    return x + (x @ params["square"]) * params["scale"][None]


def gradients(params, x, cotangent):
    return jax.vjp(block, params, x)[1](cotangent)


def recomputed(params, x, cotangent):
    return jax.vjp(jax.checkpoint(block), params, x)[1](cotangent)


@pytest.fixture
def given():
    rng = np.random.default_rng(0)

    def random(*shape):
        return jnp.asarray(rng.normal(size=shape), "bfloat16")

    params = {
        "query": random(WIDTH, HEADS, SIZE),
        "out": random(HEADS, SIZE, WIDTH),
        "square": random(WIDTH, WIDTH),
        "scale": random(WIDTH),
    }
    totals = jax.tree.map(lambda x: jnp.full(x.shape, 0.125, "float32"), params)
    return totals, (params, random(TOKENS, WIDTH), random(TOKENS, WIDTH))


def products(function, *args):
    """Dtypes of what products of a program for GPUs return, if it is a matrix."""
    traced = jax.jit(function).trace(*args)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    made = re.findall(r"stablehlo.dot_general.*-> tensor<([0-9x]+)x(\w+)>", text)
    return [dtype for dims, dtype in made if str(TOKENS) not in dims.split("x")]


@pytest.mark.parametrize("function", [gradients, recomputed])
def test_products_round_no_gradient(function, given):
    """Fails if a gradient is rounded to 16 bits before it is added, or added twice."""
    totals, args = given
    found, cotangent = jax.jit(
        lambda totals, *args: add_in_products(function, totals, *args)
    )(totals, *args)
    grads, wanted = jax.jit(function)(*args)
    np.testing.assert_array_equal(cotangent, wanted)
    rounded = add(totals, grads)
    for name in totals:
        assert found[name].dtype == jnp.float32
        np.testing.assert_allclose(found[name], rounded[name], 0.02, 0.2)
        assert (found[name] == rounded[name]).all() == (name == "scale")


@pytest.mark.parametrize("function", [gradients, recomputed])
def test_each_matrix_has_one_product(function, given):
    """Fails if what a gradient was made by stays beside what adds to its sum."""
    totals, args = given
    assert products(function, *args) == ["bf16"] * 3
    run = products(lambda *x: add_in_products(function, *x), totals, *args)
    assert run == ["f32"] * 3


def test_what_else_reads_a_gradient_has_it_as_it_was():
    """Fails if a product is made in another dtype for readers of its rounded result."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(8, 8)), "bfloat16")
    zeros = jnp.zeros((8, 8))

    def shared(x):
        product = x @ x
        return product, jnp.sin(product)

    alone, _ = add_in_products(lambda x: (x @ x, ()), zeros, x)
    exact = np.linalg.matrix_power(np.asarray(x, "float64"), 2)
    np.testing.assert_allclose(alone, exact, 1e-5, 1e-5)
    found, sines = add_in_products(shared, zeros, x)
    np.testing.assert_array_equal(found, jnp.asarray(x @ x, "float32"))
    np.testing.assert_array_equal(sines, jnp.sin(x @ x))
    assert (found != alone).any()


@pytest.mark.parametrize("dtype", ["int32", "float8_e4m3fn"])
def test_what_is_rounded_on_purpose_is_added_as_it_is(dtype):
    """Fails if a gradient that is quantised is added as it was before."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(8, 8)), "bfloat16")

    def rounded(x):
        return (x @ x).astype(dtype).astype("bfloat16"), ()

    found, _ = add_in_products(rounded, jnp.zeros((8, 8)), x)
    np.testing.assert_array_equal(found, jnp.asarray(rounded(x)[0], "float32"))


def test_products_are_no_narrower_than_they_were():
    """Fails if operands are rounded to the dtype of a narrower sum."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(8, 8)), "float32")
    zeros = jnp.zeros((8, 8), "bfloat16")
    found, _ = add_in_products(lambda x: (x @ x, ()), zeros, x)
    assert found.dtype == zeros.dtype
    np.testing.assert_array_equal(found, (x @ x).astype(zeros.dtype))


def test_a_chunk_alone_is_added_to():
    totals = [{"w": jnp.full(2, float(chunk))} for chunk in range(3)]
    grads = {"w": jnp.ones(2, "bfloat16")}
    found = jax.jit(add_to_chunk)(totals, grads, jnp.int32(1))
    assert [x["w"].tolist() for x in found] == [[0, 0], [2, 2], [2, 2]]
