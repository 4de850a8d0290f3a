"""The GPU kernel: run by the interpreter with races detected, and lowered for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.decode.oracle import attend, make_case
from tests.support.cases import some_by_hand
from tests.support.interpreter import InterpretGPUParams
from tests.support.lowering import num_kernels
from zjax_kernels import paged_attention
from zjax_kernels.decode import mosaic_gpu
from zjax_kernels.decode.mosaic_gpu import work
from zjax_kernels.decode.reference import Cache, Options
from zjax_kernels.decode.tuning import Tuning

QUICK = {
    "decoded tokens": dict(
        case=dict(starts=[300, 15, 0, 63], counts=[1, 1, 0, 1], page_size=64),
        settings=dict(soft_cap=1.5),
        splits=2,
    ),
    "small pages, tiles of a prompt, a window and sinks": dict(
        case=dict(starts=[100, 0], counts=[20, 7], tokens=20, heads=7, num_heads=1),
        settings=dict(window=40, sinks=np.linspace(-1, 3, 7, dtype=np.float32)),
        splits=2,
    ),
    "more keys than stages": dict(
        case=dict(starts=[310, 200], counts=[3, 1], tokens=3, page_size=256, size=128),
        settings=dict(scale=0.3),
        splits=1,
    ),
}
CASES = QUICK | {
    "heads of 256 channels": dict(
        case=dict(
            starts=[319], counts=[1], page_size=32, size=256, heads=1, num_heads=1
        ),
        settings=dict(window=300),
        dtype=jnp.float16,
        splits=4,
    ),
}


@pytest.mark.parametrize("name", some_by_hand(CASES, CASES.keys() - QUICK))
def test_kernel_is_attention_over_the_keys_of_the_row(monkeypatch, capfd, name):
    """Fails if the kernel leaves out, adds or races for anything."""
    assert_attention(monkeypatch, **CASES[name])
    assert "RACE" not in "".join(capfd.readouterr())


def assert_attention(monkeypatch, case, settings, splits, dtype=jnp.bfloat16):
    arrays = make_case(**case)
    *floats, pages, starts, counts = arrays
    q, keys, values = (jnp.asarray(x, dtype) for x in floats)
    cache, tuning = Cache(keys, values, pages, starts, counts), Tuning(2, 1, 1)
    items = work.Sizes.of(q, cache, tuning).items
    monkeypatch.setattr(work, "NUM_SMS", items * splits)
    assert work.Sizes.of(q, cache, tuning).splits == splits
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
    on_hopper, size, page_size, tokens, group, settings
):
    """Fails if the kernel asks for what Mosaic cannot do: copies, layouts, products."""
    dtype = jnp.float16 if settings else jnp.bfloat16
    q = jax.ShapeDtypeStruct((3, tokens, 2 * group, size), dtype)
    pool = jax.ShapeDtypeStruct((40, 2, page_size, size), dtype)
    pages = jax.ShapeDtypeStruct((3, 64), jnp.int32)
    places = jax.ShapeDtypeStruct((3,), jnp.int32)
    run = functools.partial(paged_attention, **settings)
    assert num_kernels(run, q, pool, pool, pages, places, places) == 1


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
