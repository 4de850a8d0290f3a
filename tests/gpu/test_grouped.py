"""Grouped products on the GPU against a loop over groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.gpu import NEEDS_HOPPER
from zjax_kernels import grouped_matmul

pytestmark = NEEDS_HOPPER
K, N = 384, 640


def zipf(groups, rows):
    shares = 1 / np.arange(1, groups + 1)
    sizes = np.floor(rows * shares / shares.sum()).astype(int)
    return np.random.default_rng(0).permutation(sizes)


CASES = {
    "few groups, rows that 8 does not divide": (
        [100, 0, 131, 26, 300, 1, 7, 420],
        1001,
    ),
    "groups beyond 128": (zipf(512, 9000), 9003),
    "all rows in one group": ([0, 0, 1024, 0], 1024),
    "fewer rows than a tile": ([3, 0, 2], 5),
    "no rows in any group": ([0, 0], 256),
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("sizes", "rows"), CASES.values(), ids=CASES)
def test_products_and_gradients_are_those_of_a_loop(sizes, rows, dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (rows, K), (len(sizes), K, N), (rows, N)
    x, weights, cotangent = (
        jax.random.normal(key, shape, dtype)
        for key, shape in zip(keys, shapes, strict=True)
    )

    def run(implementation):
        def product(x, weights):
            given = jnp.asarray(sizes, jnp.int32)
            return grouped_matmul(x, weights, given, implementation=implementation)

        out, pull = jax.vjp(product, x, weights)
        return out, *pull(cotangent)

    found, again, expected = (
        jax.jit(run, static_argnums=0)(name)
        for name in ("mosaic_gpu", "mosaic_gpu", "reference")
    )
    for one, other, right in zip(found, again, expected, strict=True):
        np.testing.assert_array_equal(one, other)
        error = jnp.abs(one.astype(jnp.float32) - right.astype(jnp.float32)).max()
        assert error <= 1e-2 * jnp.abs(right.astype(jnp.float32)).max()
