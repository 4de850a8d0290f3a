"""Filters of decoded tokens on the GPU against the reference, bit by bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.decode.test_filters import make_case, weights_of
from tests.support.gpu import NEEDS_HOPPER
from zjax_kernels import find_best, top_k_threshold, top_p_threshold

pytestmark = NEEDS_HOPPER
SIZES = [40, 1000, 50257, 128256, 262208]


def both(function, *arrays):
    """Results of the kernel and of the reference."""
    return [
        jax.jit(functools.partial(function, implementation=name))(*arrays)
        for name in ("mosaic_gpu", "reference")
    ]


@pytest.mark.parametrize("size", SIZES)
def test_thresholds_equal_the_reference(size):
    logits, top_k, shares = make_case(size)
    np.testing.assert_array_equal(*both(top_k_threshold, logits, top_k))
    weights = weights_of(logits)
    np.testing.assert_array_equal(*both(top_p_threshold, logits, weights, shares))


@pytest.mark.parametrize("size", SIZES)
def test_best_tokens_equal_the_reference(size):
    logits, top_k, _ = make_case(size)
    counts = np.minimum(top_k, 20)

    def find(logits, counts, implementation):
        return find_best(logits, 20, counts, implementation=implementation)

    kernel, reference = both(find, logits, counts)
    jax.tree.map(np.testing.assert_array_equal, kernel, reference)


def test_many_rows():
    """Fails if programs of more rows than the GPU holds at once mix rows up."""
    logits = jax.random.normal(jax.random.key(0), (300, 32000))
    top_k = jnp.arange(1, 301, dtype=jnp.int32)
    np.testing.assert_array_equal(*both(top_k_threshold, logits, top_k))
