"""Writes to the pages of a cache: against NumPy, in place, on each device its heads."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zjax_kernels import write_pages

PAGE_SIZE = 16


def make_writes(num_heads=2, channels=8):
    rng = np.random.default_rng(0)
    pool = rng.normal(size=(9, num_heads, PAGE_SIZE, channels)).astype(np.float32)
    new = rng.normal(size=(4, 20, num_heads, channels)).astype(np.float32)
    pages = np.int32([[3, 7, 0], [5, 2, 8], [1, 0, 0], [4, 6, 0]])
    # Two pages and a half, one token at the end of a page, none, and all.
    return pool, new, pages, np.int32([10, 47, 0, 0]), np.int32([13, 1, 0, 20])


def write(pool, new, pages, starts, counts):
    pool = pool.copy()
    for chunk, count in enumerate(counts):
        for token in range(count):
            page, slot = divmod(starts[chunk] + token, PAGE_SIZE)
            pool[pages[chunk, page], :, slot] = new[chunk, token]
    return pool


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_tokens_that_count_are_written_where_they_belong(dtype):
    pool, new, *places = make_writes()
    pool = jnp.asarray(pool, dtype)
    found = jax.jit(write_pages)(pool, new, *places)
    assert found.dtype == dtype
    expected = write(np.asarray(pool), np.asarray(new, dtype), *places)
    np.testing.assert_array_equal(found, expected)


def test_large_numbers_saturate_in_float8():
    """Fails if a key beyond the largest number of a dtype becomes NaN."""
    pool, new, *places = make_writes()
    new[0, :3, 0, 0] = 1e6, -1e6, 449
    pool = jnp.asarray(pool, jnp.float8_e4m3fn)
    found = jax.jit(write_pages)(pool, new, *places)
    saturated = np.asarray(new.clip(-448, 448), jnp.float8_e4m3fn)
    expected = write(np.asarray(pool), saturated, *places)
    np.testing.assert_array_equal(np.float32(found), np.float32(expected))


def compile_write(shardings):
    arrays = [
        jax.device_put(x, sharding)
        for x, sharding in zip(make_writes(num_heads=4), shardings, strict=True)
    ]
    lowered = jax.jit(write_pages, donate_argnums=0).lower(*arrays)
    return lowered.compile(), arrays


def test_a_donated_pool_is_updated_in_place():
    """Fails if the pool is copied or transposed."""
    compiled, arrays = compile_write([None] * 5)
    pool = "f32[9,4,16,8]"
    assert "may-alias" in compiled.as_text()
    assert not re.search(
        rf"{re.escape(pool)}\S* (copy|transpose)\(", compiled.as_text()
    )
    assert compiled.memory_analysis().temp_size_in_bytes < arrays[0].nbytes


def test_heads_over_devices_need_no_communication():
    """Fails if the compiler gathers the pool on a device."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("tensor",))
    specs = ((None, "tensor"), (None, None, "tensor"), (), (), ())
    spread = [
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        for spec in specs
    ]
    compiled, arrays = compile_write(spread)
    for collective in ("all-gather", "all-reduce", "all-to-all", "permute"):
        assert collective not in compiled.as_text()
    expected = write(*map(np.asarray, arrays))
    np.testing.assert_array_equal(compiled(*arrays), expected)
