"""The kernel for latents: run by the interpreter with races detected, and lowered."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.decode.oracle import attend, make_case
from tests.support.cases import some_by_hand
from tests.support.interpreter import InterpretGPUParams
from tests.support.lowering import cuda_program, num_kernels
from tests.support.refusals import value_error
from zjax_kernels import paged_attention
from zjax_kernels.decode.latent import mosaic_gpu
from zjax_kernels.decode.latent.mosaic_gpu import work
from zjax_kernels.decode.latent.mosaic_gpu.merge import merge_splits
from zjax_kernels.decode.mosaic_gpu import work as paged
from zjax_kernels.decode.mosaic_gpu.work import STEP, find_split
from zjax_kernels.decode.reference import Cache, Options
from zjax_kernels.decode.tuning import Tuning
from zjax_kernels.warpgroups import HAS_EARLY_START

QUICK = {
    "decoded tokens, more keys than stages": dict(
        case=dict(starts=[150, 0, 63], counts=[1, 0, 1], page_size=64), splits=1
    ),
    "tokens of a prompt, whose keys three programs share": dict(
        case=dict(starts=[130, 0], counts=[4, 6], tokens=6, page_size=16, heads=8),
        splits=3,
    ),
}
CASES = QUICK | {
    "all channels, a group of two tiles": dict(
        case=dict(starts=[70], counts=[1], heads=128, size=576, page_size=128),
        splits=1,
        value_size=512,
        scale=0.03,
    ),
    "heads of latents, rows without keys in some programs": dict(
        case=dict(
            starts=[319, 2], counts=[1, 1], heads=32, num_heads=2, page_size=32, seed=3
        ),
        splits=2,
        dtype=jnp.float16,
    ),
}


@pytest.mark.parametrize("name", some_by_hand(CASES, CASES.keys() - QUICK))
def test_kernel_is_attention_over_the_latents_of_the_row(monkeypatch, capfd, name):
    """Fails if the kernel leaves out, adds or races for anything."""
    assert_attention(monkeypatch, **CASES[name])
    assert "RACE" not in "".join(capfd.readouterr())


def assert_attention(
    monkeypatch, case, splits, value_size=128, scale=0.1, dtype=jnp.bfloat16
):
    case = dict(heads=16, num_heads=1, size=192) | case
    q, keys, _, *places = make_case(**case, value_size=1)
    q, keys = (jnp.asarray(x, dtype) for x in (q, keys))
    cache, tuning = Cache(keys, keys, *places), Tuning(2, 1, 1)
    items = work.LatentSizes.of(q, cache, tuning).items
    monkeypatch.setattr(paged, "NUM_SMS", items * splits)
    assert work.LatentSizes.of(q, cache, tuning).splits == splits
    run = functools.partial(
        mosaic_gpu.paged_attention,
        options=Options(scale, window=0, soft_cap=0.0, value_size=value_size),
        tuning=tuning,
        interpret=InterpretGPUParams(detect_races=True),
    )
    found = np.asarray(jax.jit(run)(q, cache, None), np.float32)
    rounded = [np.asarray(x, np.float32) for x in (q, keys, keys)]
    expected = attend(*rounded, *places, scale=scale, value_size=value_size)
    atol = 5e-3 * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, atol=atol)
    counted = np.arange(found.shape[1]) < places[-1][:, None]
    assert not found[~counted].any()


def decoded(
    chunks=1, heads=16, tokens=1, size=576, page_size=64, dtype=jnp.bfloat16, pages=64
):
    """Shapes of queries, latents and places of a call."""
    q = jax.ShapeDtypeStruct((chunks, tokens, heads, size), dtype)
    pool = jax.ShapeDtypeStruct((40, 1, page_size, size), dtype)
    table = jax.ShapeDtypeStruct((chunks, pages), jnp.int32)
    places = jax.ShapeDtypeStruct((chunks,), jnp.int32)
    return q, pool, table, places, places


def attend_to_latents(q, pool, *places, value_size=512, **settings):
    """A call of the kernel in which one array is keys and values."""
    settings = dict(value_size=value_size, implementation="mosaic_gpu") | settings
    return paged_attention(q, pool, pool, *places, **settings)


@pytest.mark.parametrize(
    ("given", "value_size"),
    [
        (dict(heads=128), 512),
        (dict(heads=64, chunks=132, page_size=256), 512),
        (dict(heads=16, chunks=3, tokens=8, page_size=16, dtype=jnp.float16), 512),
        (dict(heads=8, chunks=3, tokens=64, page_size=128), 384),
        (dict(heads=32, size=256, page_size=32), 128),
        (dict(heads=16, size=448), 256),
    ],
)
def test_every_variant_lowers_for_cuda(on_hopper, given, value_size):
    """Fails if the kernel asks for what Mosaic cannot do, or for too much memory."""
    run = functools.partial(attend_to_latents, value_size=value_size)
    assert num_kernels(run, *decoded(**given)) == 1


def test_latents_have_a_kernel_by_default(on_hopper):
    """Fails if `auto` attends to latents without the kernel."""
    run = functools.partial(attend_to_latents, implementation="auto")
    assert num_kernels(run, *decoded()) == 1


@pytest.mark.parametrize("early", [False, True])
def test_early_kernels_wait_for_the_kernels_before(on_hopper, early):
    """Fails if a kernel never starts early, or starts so without being asked."""
    run = functools.partial(attend_to_latents, early=early)
    text = cuda_program(run, *decoded())
    assert ("griddepcontrol.wait" in text) == (early and HAS_EARLY_START)


def test_latents_are_read_by_one_kernel_as_they_are(on_hopper):
    """Fails if latents are copied, cut, padded or given twice, or outputs merged."""
    text = cuda_program(attend_to_latents, *decoded(chunks=64, heads=128))
    assert set(re.findall(r"stablehlo\.\w+", text)) == {
        "stablehlo.custom_call",
        "stablehlo.reshape",
    }
    [operands] = re.findall(r"custom_call @mosaic_gpu\w*\((.*?)\)", text)
    assert operands.split(", ") == [f"%arg{number}" for number in range(5)]


@pytest.mark.parametrize(
    ("chunks", "heads", "table_size", "splits"),
    [
        (1, 16, 64, 16),
        (1, 128, 64, 16),
        (8, 128, 64, 8),
        (32, 128, 64, 2),
        (32, 16, 64, 4),
        (8, 16, 4, 1),
        (67, 128, 64, 1),
    ],
)
def test_programs_share_long_rows_until_the_gpu_is_full(
    chunks, heads, table_size, splits
):
    q, pool, *places = decoded(chunks, heads, pages=table_size)
    sizes = work.LatentSizes.of(q, Cache(pool, pool, *places), work.H200)
    assert sizes.splits == splits
    assert sizes.items * splits <= 132 or splits == 1


@pytest.mark.parametrize("splits", [1, 3, 7])
def test_splits_share_all_keys(monkeypatch, splits):
    """Fails if a key of a row is read twice, or by no program."""
    q, pool = np.zeros((2, 8, 16, 192)), np.zeros((1, 1, 64, 192))
    starts, counts = np.int32([700, 5]), np.int32([8, 3])
    cache = Cache(pool, pool, np.zeros((2, 16), np.int32), starts, counts)
    sizes = work.LatentSizes.of(q, cache, Tuning(2, 1, 1))
    monkeypatch.setattr(paged, "NUM_SMS", sizes.items * splits)
    assert sizes.splits == splits
    for item in range(sizes.items):
        args = jnp.array(starts), jnp.array(counts), jnp.int32(item)
        places = [find_split(sizes, 0, *args, jnp.int32(x)) for x in range(splits)]
        found = [
            int(x.first) + step for x in places for step in range(int(x.num_steps))
        ]
        assert found == [*range(-(-int(places[0].end) // STEP))]


def test_outputs_of_splits_are_merged():
    rng = np.random.default_rng(0)
    scores, values = rng.normal(size=(5, 40)) * 9, rng.normal(size=(40, 8))
    # The third row sees no key of the first split, the last row sees none at all.
    scores[2, :10] = scores[4] = -np.inf
    outs, sums = [], []
    for keys in np.split(np.arange(40), 4):
        weights = np.exp(scores[:, keys])
        total = weights.sum(1)
        outs.append(weights @ values[keys] / np.where(total, total, 1)[:, None])
        with np.errstate(divide="ignore"):
            sums.append(np.log(total))
    shape = 5, 1, 1  # chunks, tokens, heads
    out = np.float32(outs).reshape(4, *shape, 8)
    found = merge_splits(jnp.array(out), jnp.float32(sums).reshape(4, *shape))
    weights = np.exp(scores)
    total = weights.sum(1)
    expected = weights @ values / np.where(total, total, 1)[:, None]
    np.testing.assert_allclose(found.reshape(5, 8), expected, atol=1e-5)


SEPARATE = "it needs keys of 192 channels to be the values, of 128; give the keys as "
REFUSED = {
    "values apart": (dict(values=True), SEPARATE + "the values, with a value_size"),
    "other groups of heads": (
        dict(case=dict(heads=24)),
        "it needs 8, 16, 32, 64, 128 query heads per head of latents, not 24; pad the "
        "heads",
    ),
    "a window": (
        dict(settings=dict(window=9)),
        "it attends to latents without window; leave out window",
    ),
    "a cap": (
        dict(settings=dict(soft_cap=2.0)),
        "it attends to latents without soft_cap; leave out soft_cap",
    ),
    "sinks": (
        dict(settings=dict(sinks=np.ones(16, np.float32))),
        "it attends to latents without sinks; leave out sinks",
    ),
    "small pages": (
        dict(case=dict(page_size=8)),
        "it needs pages of 16, 32, 64, 128, 256 tokens and these have 8; make other "
        "pages",
    ),
    "latents of a small model": (
        dict(case=dict(size=24), settings=dict(value_size=16)),
        "it needs keys and values of 64, 128, 256 channels, not 24 and 16; pad the "
        "heads",
    ),
    "latents beyond the memory": (
        dict(case=dict(size=640)),
        "it needs keys and values of 64, 128, 256 channels, not 640 and 128; pad the "
        "heads",
    ),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_kernel_refuses(on_hopper, given, message):
    """Fails if an option has no effect, or the reference does not run in its place."""
    case = dict(heads=16, num_heads=1, size=192) | given.get("case", {})
    q, keys, _, *places = make_case([3], [1], **case, value_size=1)
    q, keys = (jnp.nan_to_num(jnp.asarray(x, jnp.bfloat16)) for x in (q, keys))
    values = keys + 0 if "values" in given else keys
    run = functools.partial(
        paged_attention, **dict(value_size=128) | given.get("settings", {})
    )
    with value_error(
        f"implementation=mosaic_gpu cannot run: {message}, or use "
        "implementation='reference'"
    ):
        run(q, keys, values, *places, implementation="mosaic_gpu")
    assert jnp.isfinite(run(q, keys, values, *places)).all()
