"""Paged attention over latents on the GPU against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.decode.oracle import make_case
from tests.support.gpu import NEEDS_HOPPER
from zjax_kernels import paged_attention

pytestmark = NEEDS_HOPPER
SIZE, VALUE_SIZE = 576, 512
SPREAD_8 = [1, 64, 65, 700, 1500, 2047, 3000, 4096]
SPREAD_32 = [*np.linspace(1, 4096, 32, dtype=int)]
CASES = {
    "a row, whose keys many programs share": dict(starts=[4095], counts=[1], heads=128),
    "the first token of a row": dict(starts=[0], counts=[1]),
    "8 rows, one without a token": dict(
        starts=np.subtract(SPREAD_8, 1), counts=[1] * 7 + [0], heads=128, page_size=16
    ),
    "32 rows": dict(starts=np.subtract(SPREAD_32, 1), counts=[1] * 32, heads=128),
    "32 rows of few heads": dict(
        starts=np.subtract(SPREAD_32, 1), counts=[1] * 32, page_size=256
    ),
    "70 short rows, one split": dict(
        starts=np.arange(70) * 7, counts=[1] * 70, heads=128
    ),
    "speculated tokens": dict(
        starts=[900, 3, 4000], counts=[8, 5, 0], tokens=8, page_size=32
    ),
    "pieces of prompts": dict(
        starts=[1000, 0, 128], counts=[64, 40, 0], tokens=64, page_size=128
    ),
    "pieces of many prompts, one split": dict(
        starts=[100, 0, 17, 900], counts=[64, 40, 64, 1], tokens=64, heads=128
    ),
}


def latents(name, dtype):
    """Queries, latents of which nobody's are NaN, and places."""
    case = dict(heads=16, num_heads=1, size=SIZE, page_size=64) | CASES[name]
    q, keys, _, *places = make_case(**case, value_size=1)
    return jnp.asarray(q, dtype), jnp.asarray(keys, dtype), *places


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, jnp.bfloat16) for name in CASES), ("speculated tokens", jnp.float16)],
)
def test_kernel_computes_what_the_reference_does(name, dtype):
    """Also where latents of nobody, and places behind the end of a row, are NaN."""
    q, keys, *places = latents(name, dtype)

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation, q, keys):
        settings = dict(value_size=VALUE_SIZE, implementation=implementation)
        return paged_attention(q, keys, keys, *places, **settings)

    found, again, expected = (
        np.float64(run(implementation, q, keys))
        for implementation in ("mosaic_gpu", "mosaic_gpu", "reference")
    )
    np.testing.assert_array_equal(found, again)
    np.testing.assert_allclose(found, expected, atol=1e-2 * np.abs(expected).max())


def test_smaller_latents_of_two_heads():
    case = dict(heads=32, num_heads=2, size=192, page_size=64, tokens=2, value_size=1)
    q, keys, _, *places = make_case([500, 3], [2, 1], **case)
    q, keys = (jnp.asarray(x, jnp.bfloat16) for x in (q, keys))

    def run(implementation):
        settings = dict(value_size=128, implementation=implementation)
        return np.float64(paged_attention(q, keys, keys, *places, **settings))

    found, expected = map(run, ("mosaic_gpu", "reference"))
    np.testing.assert_allclose(found, expected, atol=1e-2 * np.abs(expected).max())


@pytest.mark.parametrize(
    "name", ["8 rows, one without a token", "70 short rows, one split"]
)
def test_early_kernels_compute_the_same(name):
    """Fails if a kernel reads queries before the last one has written them."""
    q, keys, *places = latents(name, jnp.bfloat16)

    @functools.partial(jax.jit, static_argnums=1)
    def run(q, early):
        for _ in range(20):
            settings = dict(value_size=VALUE_SIZE, implementation="mosaic_gpu")
            out = paged_attention(q, keys, keys, *places, early=early, **settings)
            q = q.at[..., :VALUE_SIZE].add(out)
        return q

    expected = np.float32(run(q, False))
    for _ in range(5):
        np.testing.assert_array_equal(np.float32(run(q, True)), expected)
