"""Quantisation: both implementations against NumPy, one block at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.interpreter import InterpretGPUParams
from tests.support.lowering import num_kernels
from tests.support.refusals import value_error
from zjax_kernels.quantise import (
    dequantise_blocks,
    mosaic_gpu,
    quantise_blocks,
    reference,
)


def numbers(num_blocks, block):
    x = np.random.default_rng(0).normal(size=(num_blocks, block)).astype(np.float32)
    x[:3] *= np.float32([[0.0], [1e-20], [1e30]])
    x[3], x[3, :4] = 0.5, (127, 2.5, 3.5, -2.5)  # halves go to the even number
    return x


def exact(x):
    scales = np.maximum(np.abs(x).max(1) / np.float32(127), np.float32(1e-12))
    return np.rint(x / scales[:, None]).astype(np.int8), scales


@pytest.fixture(params=["reference", "mosaic_gpu"])
def quantise(request, monkeypatch):
    if request.param == "reference":
        return functools.partial(reference.quantise_blocks, block=64)
    monkeypatch.setattr(mosaic_gpu, "_PROGRAMS", 2)  # of three tiles
    params = InterpretGPUParams(detect_races=True)
    run = functools.partial(mosaic_gpu.quantise_blocks, block=64, interpret=params)
    return jax.jit(run)


def test_equals_numpy(quantise):
    x = numbers(3 * reference.BLOCKS_PER_STEP, 64)
    integers, scales = quantise(x.reshape(-1))
    expected, exact_scales = exact(x)
    assert (integers.dtype, scales.dtype) == (jnp.int8, jnp.float32)
    np.testing.assert_allclose(scales, exact_scales, rtol=1e-6)
    np.testing.assert_array_equal(integers, expected)


def test_comes_back_within_half_a_step():
    x = numbers(8, 32)
    integers, scales = quantise_blocks(jnp.asarray(x), block=32)
    found = dequantise_blocks(integers, scales).reshape(x.shape)
    assert (np.abs(found - x) <= 0.5001 * np.asarray(scales)[:, None]).all()
    several = dequantise_blocks(jnp.stack([integers] * 2), jnp.stack([scales] * 2))
    np.testing.assert_array_equal(several[1].reshape(x.shape), found)


@pytest.mark.parametrize("block", reference.SIZES)
def test_kernel_lowers_for_cuda(block):
    x = jax.ShapeDtypeStruct((5, 64 * block), jnp.float32)
    run = functools.partial(mosaic_gpu.quantise_blocks, block=block)
    assert num_kernels(run, x) == 1


def test_blocks_that_do_not_divide():
    with value_error(
        "block=64 does not divide 100 numbers; use a divisor, or pad the numbers"
    ):
        quantise_blocks(jnp.ones(100), block=64)


@pytest.mark.parametrize(
    ("x", "block", "message"),
    [
        (
            jnp.ones(4096, jnp.bfloat16),
            64,
            "it needs float32 and the array is bfloat16; cast it",
        ),
        (
            jnp.ones(4096),
            32,
            "it needs blocks of 64, 128, 256 and this is 32; choose one of them",
        ),
        (
            jnp.ones(640),
            64,
            "it needs 64 blocks or a multiple and has 10; pad the numbers",
        ),
    ],
)
def test_what_the_kernel_refuses(on_hopper, x, block, message):
    with value_error(
        f"implementation=mosaic_gpu cannot run: {message}, or use "
        "implementation='reference'"
    ):
        quantise_blocks(x, block=block, implementation="mosaic_gpu")
    assert quantise_blocks(x, block=block)[0].dtype == jnp.int8  # by the reference
