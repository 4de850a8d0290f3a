"""Grouped products on the GPU against a loop over groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.gpu import NEEDS_HOPPER
from zjax.moe.dispatch import sort_by_expert
from zjax_kernels import (
    copy_rows,
    grouped_activation,
    grouped_activation_backward,
    grouped_matmul,
)
from zjax_kernels.grouped.reference import num_parts

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
    assert_close(found, again, expected)


def assert_close(found, again, expected):
    """Kernels repeat their results bit for bit, and compute those of plain JAX."""
    for one, other, right in zip(found, again, expected, strict=True):
        np.testing.assert_array_equal(one, other)
        error = jnp.abs(one.astype(jnp.float32) - right.astype(jnp.float32)).max()
        assert error <= 1e-2 * jnp.abs(right.astype(jnp.float32)).max()


@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu", "gelu", "relu"])
@pytest.mark.parametrize(("sizes", "rows"), CASES.values(), ids=CASES)
def test_epilogues_compute_what_plain_jax_does(sizes, rows, activation):
    groups, parts = len(sizes), num_parts(activation)
    shapes = (
        (rows, K),
        (groups, K, parts * N),
        (groups, parts * N),
        (groups, N, K),
        (rows, parts * N),
        (rows,),
    )
    keys = jax.random.split(jax.random.key(0), len(shapes))
    pairs = zip(keys, shapes, strict=True)
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in pairs]
    x, weights, bias, down, inputs, scale = arrays
    given = jnp.asarray(sizes, jnp.int32)

    def run(implementation):
        settings = {"activation": activation, "implementation": implementation}
        forward = grouped_activation(x, weights, given, bias=bias, **settings)
        wide = scale.astype(jnp.float32)
        return *forward, *grouped_activation_backward(
            x, down, given, inputs, wide, **settings
        )

    assert_close(
        *(
            jax.jit(run, static_argnums=0)(name)
            for name in ("mosaic_gpu", "mosaic_gpu", "reference")
        )
    )


@pytest.mark.parametrize(("tokens", "rows"), [(3, None), (1000, None), (1000, 2000)])
def test_rows_are_copied_to_their_places(tokens, rows):
    x = jax.random.normal(jax.random.key(0), (tokens, 640), jnp.bfloat16)
    experts = jax.random.randint(jax.random.key(1), (tokens, 4), 0, 9)
    dispatch = sort_by_expert(experts, 8, rows)
    found = copy_rows(x, dispatch.token, dispatch.row, implementation="mosaic_gpu")
    np.testing.assert_array_equal(found, x[dispatch.token])
