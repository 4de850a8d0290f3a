"""Kernels over rows of numbers on a Hopper GPU against the references."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.gpu import NEEDS_HOPPER
from zjax_kernels import layer_norm, quantise_blocks, rms_norm

pytestmark = NEEDS_HOPPER


@pytest.mark.parametrize(
    ("rows", "channels"), [(1, 128), (333, 1280), (16_384, 768), (16_384, 4096)]
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_normalisation(norm, dtype, channels, rows):
    keys = jax.random.split(jax.random.key(0), 3)
    x, d_out = jax.random.normal(keys[0], (2, rows, channels), dtype)
    weights = list(jax.random.normal(keys[1], (2, channels)))
    weights = weights if norm is layer_norm else weights[:1]

    def run(implementation):
        call = jax.jit(
            lambda *args: jax.vjp(
                lambda *given: norm(*given, implementation=implementation), *args
            )[1](d_out)
        )
        out = norm(x, *weights, implementation=implementation)
        return [np.float64(a) for a in (out, *call(x, *weights))]

    found, expected = run("mosaic_gpu"), run("reference")
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-2 * np.abs(b).max(), rtol=2e-2)
    for a, b in zip(found, run("mosaic_gpu"), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("block", [64, 128, 256])
def test_quantisation(block):
    x = jax.random.normal(jax.random.key(0), (64 * 1000 * block,))
    found = quantise_blocks(x, block=block, implementation="mosaic_gpu")
    expected = quantise_blocks(x, block=block, implementation="reference")
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)
    difference = jnp.abs(found[0].astype(jnp.int32) - expected[0])
    assert difference.max() <= 1  # where a quotient is all but a half
    assert (difference > 0).mean() < 1e-4
