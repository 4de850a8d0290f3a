"""The GPU kernel: run by the interpreter with races detected, and lowered for CUDA."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.decode.oracle import attend, make_case
from tests.support.cases import some_by_hand
from tests.support.interpreter import InterpretGPUParams
from tests.support.lowering import cuda_program, num_kernels
from zjax_kernels import paged_attention
from zjax_kernels.decode import mosaic_gpu
from zjax_kernels.decode.mosaic_gpu import work
from zjax_kernels.decode.mosaic_gpu.merge import Merged
from zjax_kernels.decode.reference import Cache, Options
from zjax_kernels.decode.tuning import H200, Tuning
from zjax_kernels.warpgroups import HAS_EARLY_START

QUICK = {
    "decoded tokens": dict(
        case=dict(starts=[300, 15, 0, 63], counts=[1, 1, 0, 1], page_size=64),
        settings=dict(soft_cap=1.5),
    ),
    "small pages, tiles of a prompt, a window and sinks": dict(
        case=dict(
            starts=[100, 0],
            counts=[20, 7],
            tokens=20,
            heads=7,
            num_heads=1,
            window=40,
        ),
        settings=dict(window=40, sinks=np.linspace(-1, 3, 7, dtype=np.float32)),
    ),
    "pages in float8": dict(
        case=dict(starts=[300, 15, 0, 63], counts=[1, 1, 0, 1], page_size=64, size=128),
        settings=dict(soft_cap=1.5),
        page_dtype=jnp.float8_e4m3fn,
    ),
    "small pages in float8, a window": dict(
        case=dict(starts=[200, 0], counts=[5, 7], tokens=8, page_size=16, window=90),
        settings=dict(window=90),
        dtype=jnp.float16,
        page_dtype=jnp.float8_e4m3fn,
    ),
    "more keys than stages": dict(
        case=dict(starts=[310, 200], counts=[3, 1], tokens=3, page_size=256, size=128),
        settings=dict(scale=0.3),
    ),
}
CASES = QUICK | {
    "a group beyond a tile": dict(
        case=dict(starts=[70], counts=[1], heads=71, num_heads=1, page_size=32),
        settings=dict(sinks=np.linspace(-1, 3, 71, dtype=np.float32)),
    ),
    "heads of 256 channels": dict(
        case=dict(
            starts=[319], counts=[1], page_size=32, size=256, heads=1, num_heads=1
        ),
        settings=dict(window=300),
        dtype=jnp.float16,
    ),
}


@pytest.mark.parametrize("name", some_by_hand(CASES, CASES.keys() - QUICK))
def test_kernel_is_attention_over_the_keys_of_the_row(monkeypatch, capfd, name):
    """Fails if the kernel leaves out, adds or races for anything."""
    assert_attention(monkeypatch, **CASES[name])
    assert "RACE" not in "".join(capfd.readouterr())


def assert_attention(monkeypatch, case, settings, dtype=jnp.bfloat16, page_dtype=None):
    arrays = make_case(**case)
    *floats, pages, starts, counts = arrays
    q, *pools = (jnp.asarray(x, dtype) for x in floats)
    keys, values = (x.astype(page_dtype or dtype) for x in pools)
    cache, tuning = Cache(keys, values, pages, starts, counts), Tuning(2, 1, 1)
    # The interpreter has no clusters, in which programs share the keys of a row.
    monkeypatch.setattr(work, "NUM_SMS", 1)
    assert work.Sizes.of(q, cache, tuning).splits == 1
    size = q.shape[-1]
    given = dict(scale=size**-0.5, window=0, soft_cap=0.0, value_size=size)
    given |= {name: x for name, x in settings.items() if name != "sinks"}
    run = functools.partial(
        mosaic_gpu.paged_attention,
        options=Options(**given),
        tuning=tuning,
        interpret=InterpretGPUParams(detect_races=True),
    )
    found = np.asarray(jax.jit(run)(q, cache, settings.get("sinks")), np.float32)
    rounded = [np.asarray(x, np.float32) for x in (q, keys, values)]
    expected = attend(*rounded, pages, starts, counts, **settings)
    np.testing.assert_allclose(found, expected, atol=1e-2)
    counted = np.arange(found.shape[1]) < counts[:, None]
    assert not found[~counted].any()


@pytest.mark.parametrize("page_dtype", ["", "float8_e4m3fn"])
@pytest.mark.parametrize("settings", [{}, dict(window=100, soft_cap=2.0)])
@pytest.mark.parametrize(
    ("size", "page_size", "tokens", "group"),
    [
        (64, 16, 1, 1),
        (128, 64, 1, 4),
        (128, 128, 64, 8),
        (256, 32, 8, 7),
        (256, 256, 1, 16),
    ],
)
def test_every_variant_lowers_for_cuda(
    on_hopper, size, page_size, tokens, group, settings, page_dtype
):
    """Fails if the kernel asks for what Mosaic cannot do: copies, layouts, products."""
    dtype = jnp.float16 if settings else jnp.bfloat16
    q = jax.ShapeDtypeStruct((3, tokens, 2 * group, size), dtype)
    shape = 40, 2, page_size, size
    pool = jax.ShapeDtypeStruct(shape, jnp.dtype(page_dtype or dtype))
    pages = jax.ShapeDtypeStruct((3, 64), jnp.int32)
    places = jax.ShapeDtypeStruct((3,), jnp.int32)
    run = functools.partial(paged_attention, implementation="mosaic_gpu", **settings)
    assert num_kernels(run, q, pool, pool, pages, places, places) == 1


def test_pages_in_float8_take_the_kernel(on_hopper):
    """Fails if keys in float8 are widened before a kernel reads them."""
    q, pool, _, *places = decoded(chunks=1, heads=8, num_heads=8)
    pool = jax.ShapeDtypeStruct(pool.shape, jnp.float8_e4m3fn)
    assert num_kernels(paged_attention, q, pool, pool, *places) == 1


@pytest.mark.parametrize("early", [False, True])
def test_early_kernels_wait_for_the_kernels_before(on_hopper, early):
    """Fails if a kernel never starts early, or starts so without being asked."""
    arrays = decoded(chunks=1, heads=8, num_heads=8)
    text = cuda_program(functools.partial(paged_attention, early=early), *arrays)
    assert ("griddepcontrol.wait" in text) == (early and HAS_EARLY_START)


def test_programs_of_a_row_fence_what_they_share(on_hopper):
    """Fails if a program may read what another has not made visible yet."""
    text = cuda_program(paged_attention, *decoded(chunks=1, heads=8, num_heads=8))
    words = "fence.acq_rel.cluster", "mbarrier.arrive.shared::cluster"
    found = re.findall("|".join(map(re.escape, words)), text)
    assert found == [words[0], words[1], words[0]]


def decoded(chunks, heads, num_heads, table_size=64, size=128):
    """Shapes of a call for one token of each row."""
    q = jax.ShapeDtypeStruct((chunks, 1, heads, size), jnp.bfloat16)
    pool = jax.ShapeDtypeStruct((40, num_heads, 64, size), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct((chunks, table_size), jnp.int32)
    places = jax.ShapeDtypeStruct((chunks,), jnp.int32)
    return q, pool, pool, pages, places, places


@pytest.mark.parametrize(
    ("chunks", "heads", "num_heads", "table_size", "splits"),
    [
        (1, 32, 32, 64, {64: 8, 128: 8}),
        (2, 32, 32, 64, {64: 4, 128: 4}),
        (4, 32, 32, 64, {64: 2, 128: 2}),
        (8, 32, 32, 64, {64: 1, 128: 1}),
        (1, 32, 8, 64, {64: 8, 128: 8}),
        (1, 32, 8, 16, {64: 8, 128: 4}),
        (64, 32, 8, 64, {64: 1, 128: 1}),
    ],
)
@pytest.mark.parametrize("size", [64, 128])
def test_attention_is_one_kernel(
    on_hopper, chunks, heads, num_heads, table_size, splits, size
):
    """Fails if anything is padded, merged, masked or cast outside of the kernel."""
    arrays = decoded(chunks, heads, num_heads, table_size, size)
    found = work.Sizes.of(arrays[0], Cache(*arrays[1:]), H200[size])
    assert found.splits == splits[size]
    sinks = jax.ShapeDtypeStruct((heads,), jnp.bfloat16)

    def run(sinks, *arrays):
        return paged_attention(*arrays, sinks=sinks)

    text = cuda_program(run, sinks, *arrays)
    assert re.findall(r"stablehlo\.\w+", text) == ["stablehlo.custom_call"]


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("splits", [1, 2, 4, 8])
def test_splits_share_all_keys(monkeypatch, splits, window):
    """Fails if a key of a row is read twice, or by no program."""
    q = np.zeros((3, 64, 16, 64))
    starts, counts = np.int32([700, 0, 5]), np.int32([64, 9, 0])
    pool, pages = np.zeros((1, 2, 64, 64)), np.zeros((3, 16), np.int32)
    cache = Cache(pool, pool, pages, starts, counts)
    sizes = work.Sizes.of(q, cache, Tuning(2, 1, 1))
    monkeypatch.setattr(work, "NUM_SMS", sizes.items * splits)
    assert sizes.splits == splits
    assert (sizes.tile_tokens, sizes.rows, sizes.items) == (8, 64, 3 * 2 * 8)
    for item in range(sizes.items):
        places = [
            work.find_split(
                sizes, window, jnp.array(starts), jnp.array(counts), *map(jnp.int32, x)
            )
            for x in itertools.product([item], range(splits))
        ]
        found = [
            int(x.first) + step for x in places for step in range(int(x.num_steps))
        ]
        settled = [
            int(x.first) + step for x in places for step in range(int(x.num_settled))
        ]
        chunk, first = int(places[0].chunk), int(places[0].first_token)
        last = min(first + 8, counts[chunk]) - 1
        first_key = max(0, starts[chunk] + first - window + 1) if window else 0
        seen = range(first_key, starts[chunk] + last + 1) if last >= first else []
        assert found == sorted({key // work.STEP for key in seen})
        assert settled == []


@pytest.mark.parametrize("window", [0, 100])
def test_keys_before_a_token_are_settled(monkeypatch, window):
    """Fails if a program copies the key of the token itself too early, or none."""
    q, pool = np.zeros((1, 1, 2, 64)), np.zeros((1, 2, 64, 64))
    cache = Cache(pool, pool, np.zeros((1, 16), np.int32), *np.int32([[700], [1]]))
    sizes = work.Sizes.of(q, cache, Tuning(2, 1, 1))
    monkeypatch.setattr(work, "NUM_SMS", sizes.items * 4)
    places = [
        work.find_split(
            sizes, window, *map(jnp.array, cache[3:]), jnp.int32(0), jnp.int32(split)
        )
        for split in range(4)
    ]
    settled = [
        int(x.first) + step for x in places for step in range(int(x.num_settled))
    ]
    first_key = 700 - window + 1 if window else 0
    assert settled == [*range(first_key // work.STEP, 700 // work.STEP)]


@pytest.mark.parametrize("has_sinks", [False, True])
def test_outputs_of_splits_are_merged(has_sinks):
    rng = np.random.default_rng(0)
    scores, values = rng.normal(size=(5, 40)) * 9, rng.normal(size=(40, 8))
    # The third row sees no key of the first split, the last row sees none at all.
    scores[2, :10] = scores[4] = -np.inf
    sinks = np.float32([0, 30, -9, 1, 0]) if has_sinks else None
    parts = []
    for keys in np.split(np.arange(40), 4):
        weights = np.exp(scores[:, keys])
        total = weights.sum(1)
        out = weights @ values[keys] / np.where(total, total, 1)[:, None]
        with np.errstate(divide="ignore"):
            parts.append((np.float32(out), np.float32(np.log(total))))
    weights = np.exp(scores)
    total = weights.sum(1) + (np.exp(sinks) if has_sinks else 0)
    expected = weights @ values / np.where(total, total, 1)[:, None]
    merged = Merged.of(*parts[0])
    for part in parts[1:]:
        merged = merged.add(*part)
    np.testing.assert_allclose(merged.finish(sinks), expected, atol=1e-5)


def test_each_device_runs_the_kernel_on_its_heads(on_hopper):
    """Fails if the kernel is replaced where `shard_map` splits heads over devices."""
    spec, whole = jax.sharding.PartitionSpec, jax.sharding.PartitionSpec()
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tensor",))
    heads = spec(None, None, "tensor"), *[spec(None, "tensor")] * 2
    spread = jax.shard_map(
        paged_attention,
        mesh=mesh,
        in_specs=(*heads, whole, whole, whole),
        out_specs=heads[0],
        check_vma=False,
    )
    q = jax.ShapeDtypeStruct((3, 1, 8, 128), jnp.bfloat16)
    pool = jax.ShapeDtypeStruct((40, 4, 64, 128), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct((3, 16), jnp.int32)
    places = jax.ShapeDtypeStruct((3,), jnp.int32)
    assert num_kernels(spread, q, pool, pool, pages, places, places) == 1
