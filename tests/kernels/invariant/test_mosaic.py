"""Kernels of batch invariance: run by the interpreter, and lowered for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.interpreter import InterpretGPUParams
from tests.support.lowering import num_kernels
from tests.support.refusals import value_error
from zjax_kernels import invariant
from zjax_kernels.decode.mosaic_gpu import work
from zjax_kernels.decode.reference import Cache, Options
from zjax_kernels.decode.tuning import H200, Tuning
from zjax_kernels.grouped.tuning import Tuning as ProductTuning
from zjax_kernels.invariant import api, mosaic_gpu
from zjax_kernels.invariant.mosaic_gpu import attention
from zjax_kernels.invariant.mosaic_gpu.product import choose_tuning

RNG = np.random.default_rng(0)
INTERPRETER = InterpretGPUParams(detect_races=True)


@pytest.fixture
def one_hopper(on_hopper, monkeypatch):
    monkeypatch.setattr(api, "num_devices", lambda: 1)


def draw(*shape, dtype=jnp.bfloat16):
    return jnp.asarray(RNG.normal(size=shape), dtype)


def shape_of(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_products_are_rounded_once_to_the_dtype(dtype):
    x, weights = draw(150, 128), draw(128, 64)
    run = functools.partial(
        mosaic_gpu.matmul,
        dtype=dtype,
        tuning=ProductTuning(tile_columns=64, stages=2),
        interpret=InterpretGPUParams(),
    )
    found = jax.jit(run)(x, weights)
    expected = np.asarray(x, np.float64) @ np.asarray(weights, np.float64)
    assert found.dtype == dtype
    tolerance = 2e-6 if dtype == jnp.float32 else 4.1e-3
    np.testing.assert_allclose(np.float64(found), expected, rtol=tolerance, atol=2e-5)


@pytest.mark.parametrize("rows", [1, 300, 16384])
@pytest.mark.parametrize("transpose", [False, True])
def test_products_of_all_widths_lower_for_cuda(one_hopper, rows, transpose):
    """Fails if rows are padded, or weights are copied or transposed."""
    vocabulary = 50_257 if transpose else 151_936
    for columns, dtype in (1536, jnp.bfloat16), (8960, None), (vocabulary, jnp.float32):
        sides = (columns, 128) if transpose else (128, columns)
        arrays = shape_of(rows, 128), shape_of(*sides)
        assert invariant.has_matmul(*arrays, transpose=transpose)
        run = functools.partial(invariant.matmul, transpose=transpose, dtype=dtype)
        assert num_kernels(run, *arrays) == 1


def test_tiles_are_narrow_where_wide_ones_would_leave_multiprocessors_idle():
    found = [choose_tuning(*x).tile_columns for x in ((512, 1536), (16384, 8960))]
    assert found == [64, 256]


def test_partitions_are_sums_of_exponentials(capfd):
    """Of rows with whole chunks, and columns left behind the last chunk."""
    scores = 4 * draw(3, 2 * 4096 + 384, dtype=jnp.float32)
    run = functools.partial(mosaic_gpu.log_partition, interpret=INTERPRETER)
    expected = np.log(np.exp(np.float64(scores)).sum(-1))
    np.testing.assert_allclose(jax.jit(run)(scores), expected, rtol=1e-6)
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(("rows", "columns"), [(512, 151_936), (3, 128), (1, 128_256)])
def test_partitions_lower_for_cuda(one_hopper, rows, columns):
    scores = shape_of(rows, columns, dtype=jnp.float32)
    assert invariant.has_log_partition(scores)
    assert num_kernels(invariant.log_partition, scores) == 1


LENGTHS = [42, 21, 65, 64], [62, 1, 1, 128]
"""Texts of packed rows: tiles at the end fill the rows, as old interpreters read no
further."""
POSITIONS = np.stack([np.concatenate([*map(np.arange, each)]) for each in LENGTHS])


def attend(q, k, v, window=0, soft_cap=0.0, sinks=None):
    """Attention of packed rows in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    scores = np.einsum("blhd,bmhd->bhlm", q, k) * q.shape[-1] ** -0.5
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
    text = np.arange(POSITIONS.shape[1]) - POSITIONS
    back = POSITIONS[:, :, None] - POSITIONS[:, None]
    seen = (text[:, :, None] == text[:, None]) & (back >= 0)
    if window:
        seen &= back < window
    weights = np.where(seen[:, None], np.exp(scores), 0)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks)[:, None, None]
    return np.einsum("bhlm,bmhd->blhd", weights / total, v)


def test_packed_rows_attend_within_their_texts(capfd):
    """Fails if a tile reads a key of another text, misses one, or stores too much."""
    length = POSITIONS.shape[1]
    q, k, v = (draw(2, length, heads, 64) for heads in (4, 1, 1))
    settings = {"window": 50, "soft_cap": 1.5}
    sinks = jnp.linspace(-1, 2, 4)
    run = functools.partial(
        mosaic_gpu.packed_attention,
        options=Options(64**-0.5, value_size=64, **settings),
        tuning=Tuning(stages=2),
        interpret=INTERPRETER,
    )
    found = jax.jit(run)(q, k, v, jnp.int32(POSITIONS), sinks)
    expected = attend(q, k, v, sinks=np.asarray(sinks, np.float64), **settings)
    np.testing.assert_allclose(np.float64(found), expected, atol=1e-2)
    assert "RACE" not in "".join(capfd.readouterr())


def test_tiles_hold_tokens_of_one_text():
    positions = jnp.array([[0, 1, 2, 3, 4, 0, 1, 0], [0, 1, 2, 0, 1, 2, 3, 4]])
    tiles, count = attention._tiles(positions, 2)
    assert tiles[: count[0]].tolist() == [0, 2, 4, 5, 7, 8, 10, 11, 13, 15]
    assert set(tiles[count[0] :].tolist()) == {16}


@pytest.mark.parametrize(
    ("size", "group", "settings"),
    [(128, 6, {}), (64, 1, {"window": 100}), (256, 71, {"soft_cap": 2.0})],
)
def test_attention_lowers_for_cuda(one_hopper, size, group, settings):
    heads = 2 * group, 2, 2
    scale, sinks = size**-0.5, shape_of(2 * group)
    rows = [shape_of(2, 700, each, size) for each in heads]
    positions = shape_of(2, 700, dtype=jnp.int32)
    assert invariant.has_attention(*rows)

    def packed(sinks, *arrays):
        return invariant.packed_attention(*arrays, scale=scale, sinks=sinks, **settings)

    assert num_kernels(packed, sinks, *rows, positions) == 1
    pool, numbers = shape_of(40, 2, 64, size), shape_of(3, dtype=jnp.int32)
    pages = shape_of(3, 16, dtype=jnp.int32)

    def paged(sinks, *arrays):
        return invariant.paged_attention(*arrays, scale=scale, sinks=sinks, **settings)

    q = shape_of(3, 20, 2 * group, size)
    assert num_kernels(paged, sinks, q, pool, pool, pages, numbers, numbers) == 1


def test_one_program_has_all_keys_of_a_row(one_hopper, monkeypatch):
    """Fails if keys are split where few rows leave multiprocessors idle."""
    found = []
    of = work.Sizes.of
    monkeypatch.setattr(
        attention.kernel.Sizes, "of", lambda *x: found.append(of(*x)) or found[-1]
    )
    q, pool = shape_of(1, 1, 2, 128), shape_of(40, 2, 64, 128)
    places = shape_of(1, 64, dtype=jnp.int32), *[shape_of(1, dtype=jnp.int32)] * 2
    run = functools.partial(invariant.paged_attention, scale=0.1)
    assert num_kernels(run, q, pool, pool, *places) == 1
    assert [x.splits for x in found] == [1]
    usual = work.Sizes.of(q, Cache(pool, pool, *places), H200[128])
    assert usual.splits == 8


def test_kernels_run_where_all_programs_of_a_model_have_them(one_hopper, monkeypatch):
    """Fails if the number of rows, or a mesh, decides."""
    x, weights = shape_of(5, 128), shape_of(128, 64)
    narrow, odd = shape_of(128, 96), shape_of(5, 1, 1, 96)
    wide = shape_of(5, 128, dtype=jnp.float32)
    q = shape_of(5, 1, 1, 128)
    assert invariant.has_matmul(x, weights) and invariant.has_norm(x)
    assert invariant.has_attention(q, q, q)
    assert not invariant.has_matmul(x, narrow)
    assert not invariant.has_matmul(wide, weights)
    assert not invariant.has_norm(wide) and not invariant.has_norm(odd)
    assert not invariant.has_attention(odd, odd, odd)
    assert invariant.has_matmul(x, shape_of(77, 128), transpose=True)
    assert not invariant.has_matmul(x, shape_of(128, 77), transpose=True)
    assert invariant.has_log_partition(wide) and not invariant.has_log_partition(x)
    assert not invariant.has_log_partition(shape_of(5, 77, dtype=jnp.float32))
    assert not invariant.has_attention(q, q, shape_of(5, 1, 1, 64))
    monkeypatch.setattr(api, "num_devices", lambda: 2)
    assert not invariant.has_matmul(x, weights)
    assert not invariant.has_norm(x) and not invariant.has_attention(q, q, q)


def test_pages_without_a_kernel_are_refused(one_hopper):
    """Fails if a sampler would sum in another order than a trainer."""
    x, n = jnp.ones((1, 1, 4, 64), jnp.bfloat16), jnp.zeros(1, jnp.int32)
    with value_error(
        "page_size=4 has no kernel, and packed rows of these heads run one; use 16, "
        "32, 64, 128, 256"
    ):
        invariant.paged_attention(x, x, x, n[None], n, n, scale=1.0)
