"""Paged attention on the GPU against the reference; writes to pages in place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.decode import test_rotate as rotations
from tests.kernels.decode.oracle import make_case
from tests.support.gpu import NEEDS_HOPPER
from zjax_kernels import paged_attention, rotate_and_write, write_pages

pytestmark = NEEDS_HOPPER
CASES = {
    "decoded tokens of uneven rows": dict(
        case=dict(
            starts=[5000, 0, 63, 0, 64, 700],
            counts=[1, 1, 1, 0, 1, 1],
            heads=32,
            num_heads=8,
            size=128,
            page_size=64,
        ),
    ),
    "many rows, one split": dict(
        case=dict(
            starts=[*range(0, 1400, 35)],
            counts=[1] * 40,
            heads=8,
            num_heads=8,
            size=128,
            page_size=128,
        ),
    ),
    "pieces of prompts": dict(
        case=dict(
            starts=[1000, 0, 128],
            counts=[64, 40, 0],
            tokens=64,
            heads=14,
            num_heads=2,
            page_size=16,
        ),
        settings=dict(window=200, sinks=np.linspace(-1, 9, 14, dtype=np.float32)),
    ),
    "speculated tokens of wide heads": dict(
        case=dict(
            starts=[900, 3],
            counts=[8, 5],
            tokens=8,
            heads=16,
            num_heads=8,
            size=256,
            page_size=256,
        ),
        settings=dict(soft_cap=20.0, scale=0.2),
    ),
    "a long row, whose keys a cluster shares": dict(
        case=dict(starts=[4000], counts=[1], heads=32, num_heads=4, size=128),
        settings=dict(sinks=np.linspace(-1, 9, 32, dtype=np.float32)),
    ),
    "heads without groups": dict(
        case=dict(starts=[2500, 9], counts=[1, 1], heads=8, num_heads=8, page_size=64),
        settings=dict(window=1000, soft_cap=5.0),
    ),
    "wide heads of few rows": dict(
        case=dict(
            starts=[3000],
            counts=[1],
            heads=8,
            num_heads=1,
            size=256,
            page_size=64,
        ),
    ),
    "one head of keys": dict(
        case=dict(starts=[3000], counts=[1], heads=71, num_heads=1, page_size=32),
    ),
}


@pytest.mark.parametrize("page_dtype", ["", "float8_e4m3fn"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", CASES)
def test_kernel_computes_what_the_reference_does(name, dtype, page_dtype):
    """Also where pages of nobody, and places behind the end of a row, are NaN."""
    *floats, pages, starts, counts = make_case(**CASES[name]["case"])
    q, *pools = (jnp.asarray(x, dtype) for x in floats)
    arrays = [q, *(x.astype(page_dtype or dtype) for x in pools)]
    settings = CASES[name].get("settings", {})

    def run(implementation):
        call = functools.partial(
            paged_attention, implementation=implementation, **settings
        )
        return np.float64(jax.jit(call)(*arrays, pages, starts, counts))

    found, again, expected = map(run, ("mosaic_gpu", "mosaic_gpu", "reference"))
    np.testing.assert_array_equal(found, again)
    np.testing.assert_allclose(found, expected, atol=1e-2 * np.abs(expected).max())


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(("chunks", "tokens"), [(8, 64), (8, 1), (1, 1)])
def test_programs_of_a_row_share_no_older_numbers(chunks, tokens, size):
    """Fails if a program reads the memory of another before it is written.

    Inputs alternate: numbers of the last call would be right for equal ones.
    """
    where = [1300] * chunks, [tokens] * chunks
    given = dict(tokens=tokens, heads=16, num_heads=2, size=size, page_size=64)
    cases = [make_case(*where, **given, seed=seed) for seed in range(3)]
    cases = [[*map(jnp.bfloat16, each[:3]), *each[3:]] for each in cases]
    runs = [
        jax.jit(functools.partial(paged_attention, implementation=name))
        for name in ("reference", "mosaic_gpu")
    ]
    expected = [np.float32(runs[0](*each)) for each in cases]
    for _ in range(20):
        for each, wanted in zip(cases, expected, strict=True):
            atol = 2e-2 * np.abs(wanted).max()
            np.testing.assert_allclose(np.float32(runs[1](*each)), wanted, atol=atol)


@pytest.mark.parametrize("chunks", [1, 4, 40])
def test_early_kernels_compute_the_same(chunks):
    """Fails if a kernel reads queries before the last one has written them."""
    starts = [1500 - 30 * number for number in range(chunks)]
    case = make_case(starts, [1] * chunks, heads=32, num_heads=8, size=128)
    q, keys, values = (jnp.asarray(x, jnp.bfloat16) for x in case[:3])

    @functools.partial(jax.jit, static_argnums=1)
    def run(q, early):
        for _ in range(20):
            settings = dict(implementation="mosaic_gpu", early=early)
            q += paged_attention(q, keys, values, *case[3:], **settings)
        return q

    expected = np.float32(run(q, False))
    for _ in range(5):
        np.testing.assert_array_equal(np.float32(run(q, True)), expected)


@pytest.mark.parametrize("num_tokens", [4, 64])
@pytest.mark.parametrize("name", rotations.CASES)
def test_tokens_are_rotated_and_written(name, num_tokens):
    """Fails if the kernel leaves out or mixes up anything, early or not."""
    case = rotations.CASES[name] | {"num_tokens": num_tokens}
    arrays, settings = rotations.make_case(**case)

    @functools.partial(jax.jit, static_argnums=1)
    def run(arrays, early):
        call = functools.partial(
            rotate_and_write, early=early, implementation="mosaic_gpu", **settings
        )
        return call(*arrays)

    for early in (False, True):
        found = run(arrays, early)
        rotations.assert_rotated(found, arrays, settings, arrays[0].dtype)


@pytest.mark.parametrize("page_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("num_rows", [1, 8, 40])
def test_attention_sees_the_token_that_was_just_written(num_rows, page_dtype):
    """Fails if a kernel that starts early reads pages or queries too soon."""
    starts = np.int32([700 - 9 * row for row in range(num_rows)])
    case = make_case(starts, [1] * num_rows, heads=32, num_heads=8, size=128)
    keys, values = (jnp.nan_to_num(jnp.asarray(x, jnp.bfloat16)) for x in case[1:3])
    keys, values = keys.astype(page_dtype), values.astype(page_dtype)
    products = jax.random.normal(jax.random.key(0), (10, num_rows, 48 * 128))

    @functools.partial(jax.jit, static_argnums=(2, 3))
    def run(keys, values, early, implementation):
        outputs, settings = [], dict(early=early, implementation=implementation)
        for product in products.astype(jnp.bfloat16):
            q, keys, values = rotate_and_write(
                product, keys, values, *case[3:], **settings
            )
            outputs.append(paged_attention(q, keys, values, *case[3:], **settings))
        return jnp.stack(outputs)

    expected = np.float32(run(keys, values, False, "reference"))
    for early in (False, True, True):
        found = np.float32(run(keys, values, early, "mosaic_gpu"))
        atol = 1e-2 * np.abs(expected).max()
        np.testing.assert_allclose(found, expected, atol=atol)


def test_pages_are_written_in_place():
    """Fails if the pool is copied or transposed."""
    pool = jnp.zeros((512, 8, 64, 128), jnp.bfloat16)
    new = jax.random.normal(jax.random.key(0), (4, 3, 8, 128), pool.dtype)
    pages = jnp.arange(1, 41, dtype=jnp.int32).reshape(4, 10)
    starts, counts = jnp.array([62, 0, 300, 5]), jnp.array([3, 1, 0, 2])
    lowered = jax.jit(write_pages, donate_argnums=0).lower(
        pool, new, pages, starts, counts
    )
    compiled = lowered.compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pool.nbytes // 8
    expected = np.zeros(pool.shape, np.float32)
    for chunk, token in ((0, 0), (0, 1), (0, 2), (1, 0), (3, 0), (3, 1)):
        page, slot = divmod(int(starts[chunk]) + token, 64)
        expected[pages[chunk, page], :, slot] = new[chunk, token]
    found = compiled(pool, new, pages, starts, counts)
    np.testing.assert_array_equal(np.float32(found), expected)
