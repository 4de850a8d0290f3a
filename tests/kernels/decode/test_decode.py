"""Paged attention: the reference against NumPy, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.decode.oracle import attend, make_case
from tests.support.refusals import value_error
from zjax_kernels import paged_attention

CASES = {
    "decoded tokens of long, short, empty and new rows": (
        dict(starts=[300, 15, 0, 0, 16], counts=[1, 1, 0, 1, 1]),
        {},
    ),
    "pieces of prompts, one cut": (
        dict(starts=[270, 0, 64], counts=[7, 3, 0], tokens=7, heads=6),
        dict(scale=0.3, soft_cap=1.5),
    ),
    "a window over steps": (
        dict(starts=[600, 5, 290], counts=[3, 3, 1], tokens=3, window=20),
        dict(window=20),
    ),
    "a window of one key and sinks": (
        dict(starts=[40, 0], counts=[2, 2], tokens=2, window=1),
        dict(window=1, sinks=np.float32([0.5, -1, 3, 0])),
    ),
    "sinks, large pages and narrow values": (
        dict(starts=[260, 9], counts=[1, 1], page_size=256, size=16, value_size=8),
        dict(sinks=np.float32([0.5, -1, 30, 0])),
    ),
}


@pytest.mark.parametrize(("case", "settings"), CASES.values(), ids=CASES)
def test_reference_is_attention_over_the_keys_of_the_row(case, settings):
    arrays = make_case(**case)
    found = jax.jit(functools.partial(paged_attention, **settings))(*arrays)
    np.testing.assert_allclose(found, attend(*arrays, **settings), atol=2e-6)
    counted = np.arange(found.shape[1]) < arrays[-1][:, None]
    assert not found[~counted].any()


def test_a_cache_in_float8_is_read_in_the_dtype_of_queries():
    """Fails if scores, or products with values, have the bits of the cache."""
    q, keys, values, *places = make_case([20, 3], [1, 1])
    narrow = [jnp.asarray(x, jnp.float8_e4m3fn) for x in (keys, values)]
    found = paged_attention(q, *narrow, *places)
    expected = attend(q, *map(np.float32, narrow), *places)
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_values_are_the_first_channels_of_the_keys():
    q, keys, _, *places = make_case([20], [1], heads=3, num_heads=1, size=24)
    found = paged_attention(q, keys, keys, *places, value_size=16)
    expected = attend(q, keys, keys, *places, value_size=16)
    assert found.shape == (1, 1, 3, 16)
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_softmax_is_in_float32(dtype):
    q, keys, values, *places = make_case([500], [1])
    arrays = [jnp.asarray(x, dtype) for x in (q, keys, values)]
    found = paged_attention(*arrays, *places)
    assert found.dtype == dtype
    expected = attend(*arrays, *places)
    error = np.abs(np.asarray(found, np.float64) - expected).max()
    assert error <= jnp.finfo(dtype).eps * np.abs(expected).max()


def test_heads_over_devices_need_no_communication():
    """Fails if the compiler gathers the pool on a device."""
    arrays = make_case([40, 3], [2, 1], tokens=2, heads=8, num_heads=4)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("tensor",))
    spec = jax.sharding.PartitionSpec
    specs = spec(None, None, "tensor"), *[spec(None, "tensor")] * 2, *[spec()] * 3
    split = [
        jax.device_put(x, jax.sharding.NamedSharding(mesh, each))
        for x, each in zip(arrays, specs, strict=True)
    ]
    compiled = jax.jit(paged_attention).lower(*split).compile()
    text = compiled.as_text()
    assert "all-gather" not in text and "all-reduce" not in text
    np.testing.assert_allclose(compiled(*split), attend(*arrays), atol=2e-6)


def test_memory_does_not_grow_with_the_longest_row():
    """Fails if the reference gathers all pages at once."""

    def temporaries(num_pages):
        shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        q = jax.ShapeDtypeStruct((2, 64, 4, 64), jnp.float32)
        pool = jax.ShapeDtypeStruct((64, 2, 64, 64), jnp.float32)
        arrays = q, pool, pool, shape((2, num_pages)), shape((2,)), shape((2,))
        compiled = jax.jit(paged_attention).lower(*arrays).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(1024) <= 1.1 * temporaries(16)


def test_arrays_that_do_not_fit():
    q, keys, values, pages, starts, counts = make_case([3], [1])
    with value_error(
        "q.shape=(1, 4, 64) does not have 4 dims; give [C, T, H, D]\n"
        "values.shape=(2, 16, 64) does not have 4 dims; give [N, KV, page size, Dv]"
    ):
        paged_attention(q[0], keys, values[0], pages, starts, counts)
    with value_error(
        "keys.shape=(2, 2, 16, 64) does not fit q of 32 channels; give as many\n"
        "keys.shape=(2, 2, 16, 64) does not group 3 query heads; give heads of keys "
        "that divide the heads of queries\n"
        "values.shape=(1, 2, 16, 64) does not fit keys of shape (2, 2, 16, 64); give "
        "the same pages\n"
        "pages.shape=(1,) does not fit 1 chunks; give [C, P]\n"
        "starts.shape=(2,) does not fit 1 chunks; give [C]\n"
        "counts.dtype=float32 is not of integers; use int32\n"
        "sinks.shape=(2,) does not fit 3 heads; give one for each\n"
        "window=-1 is not within 0 and inf; use 0 for none\n"
        "soft_cap=-1.0 is not within 0 and inf; use 0 for none\n"
        "value_size=65 is not within 0 and 64; use 0 for none\n"
        "scale=0 is not above 0; give a factor"
    ):
        paged_attention(
            q[:, :, :3, :32],
            keys,
            values[:1],
            pages[0],
            np.repeat(starts, 2),
            np.float32(counts),
            scale=0,
            window=-1,
            soft_cap=-1.0,
            sinks=np.zeros(2),
            value_size=65,
        )


REFUSED = {
    "arrays of float32": (
        {},
        "it needs bfloat16 or float16 and the arrays are float32; cast them",
    ),
    "a cache in float8_e5m2": (
        dict(dtype=jnp.bfloat16, cache_dtype=jnp.float8_e5m2),
        "it needs bfloat16 or float16 and the arrays are bfloat16, float8_e5m2; cast "
        "them",
    ),
    "heads of 96 channels": (
        dict(size=96, dtype=jnp.bfloat16),
        "it needs keys and values of 64, 128, 256 channels, not 96 and 96; pad the "
        "heads",
    ),
    "narrow values": (
        dict(value_size=32, dtype=jnp.bfloat16),
        "it needs keys and values of 64, 128, 256 channels, not 64 and 32; pad the "
        "heads",
    ),
    "small pages": (
        dict(page_size=8, dtype=jnp.bfloat16),
        "it needs pages of 16, 32, 64, 128, 256 tokens and these have 8; make other "
        "pages",
    ),
}


@pytest.mark.parametrize(("case", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_kernel_refuses(on_hopper, case, message):
    case = dict(case)
    dtype = case.pop("dtype", jnp.float32)
    cache_dtype = case.pop("cache_dtype", dtype)
    *arrays, pages, starts, counts = make_case([3], [1], **case)
    q, *cache = arrays
    arrays = [jnp.asarray(q, dtype), *(jnp.asarray(x, cache_dtype) for x in cache)]
    with value_error(
        f"implementation=mosaic_gpu cannot run: {message}, or use "
        "implementation='reference'"
    ):
        paged_attention(*arrays, pages, starts, counts, implementation="mosaic_gpu")
    assert paged_attention(*arrays, pages, starts, counts).dtype == dtype
