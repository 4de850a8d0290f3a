"""The GPU kernels: run by the interpreter with races detected, and lowered for CUDA."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.sparse.dense import attend, make_inputs, mask_of
from tests.kernels.sparse.test_plan import random_live, random_mask
from tests.support.cases import some_by_hand
from tests.support.interpreter import InterpretGPUParams
from tests.support.lowering import num_kernels
from zjax_kernels.sparse import (
    BigBird,
    BlockLayout,
    limit_window,
    make_plan,
    make_selected_plan,
    make_sequence_plan,
    sequence_attention,
    sparse_attention,
    tuning,
)
from zjax_kernels.sparse import schedule as schedules
from zjax_kernels.sparse.api import RESIDUALS
from zjax_kernels.sparse.mosaic_gpu import backward_keys, backward_queries, forward
from zjax_kernels.sparse.reference import BackwardInputs, Options

QUICK = {
    "16-groups-of-three": dict(
        block=16,
        tokens=128,
        heads=3,
        causal=True,
        repeated=True,
        segments=True,
        mask=True,
    ),
    "64-window": dict(
        block=64, tokens=192, heads=1, causal=True, dense=True, window=100
    ),
}
CASES = QUICK | {
    "128-no-groups-causal": dict(
        block=128, tokens=384, num_kv_heads=2, causal=True, dense=True
    ),
    "64-window-split": dict(
        block=64,
        tokens=512,
        causal=True,
        dense=True,
        window=70,
        split=True,
        segments=True,
    ),
    "128-split": dict(block=128, tokens=512, split=True),
    "64-uneven-heads-on-two-devices": dict(
        block=64,
        tokens=512,
        heads=4,
        num_kv_heads=2,
        uneven=True,
        split=True,
        tiles=1,
        shares=2,
    ),
    "64-uneven-one-stage": dict(block=64, heads=4, uneven=True, stages=1),
    "32-capped": dict(block=32, soft_cap=2.0, stages=3),
    "64-empty": dict(block=64, empty=True, dtype=jnp.float16),
    "64-alike": dict(block=64, alike=True, programs=1),
    "64-128-channels": dict(block=64, tokens=320, head_size=128, segments=True),
    "32-256-channels": dict(block=32, head_size=256),
    "32-96-channels": dict(block=32, head_size=96),
}


def make_case(
    block,
    *,
    tokens=256,
    heads=2,
    num_kv_heads=1,
    causal=False,
    alike=False,
    dense=False,
    empty=False,
    uneven=False,
    repeated=False,
    segments=False,
    mask=False,
    window=0,
    head_size=64,
    dtype=jnp.bfloat16,
    shares=1,
    **_,
):
    """What each of some devices has: its mask, plan, inputs and segments."""
    rows = tokens // block
    live = random_live((rows, rows) if alike else (heads, rows, rows))
    if dense:
        live[...] = True
    if empty:
        live[..., rows // 2 :, :] = False
    if uneven:  # heads of a long row, of nothing, and of everything
        live[::2, 2:], live[::2, :2] = False, True
        live[1], live[3:] = False, True
    if repeated:
        live[-1] = live[0]
    layout = BlockLayout.from_dense(live, block=block, num_heads=heads, causal=causal)
    seen = random_mask((tokens, tokens)) if mask else None
    plan = make_plan(
        layout,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        segments=segments,
        mask=seen,
        head_shards=shares,
    )
    inputs = make_inputs(
        layout, batch=1, num_kv_heads=num_kv_heads, head_size=head_size, dtype=dtype
    )
    numbers = None
    if segments:
        rng = np.random.default_rng(0)
        documents = np.sort(rng.integers(0, 3, (1, plan.queries.num_rows)))
        numbers = (documents.astype(np.int32),) * 2
    shown = mask_of(layout, numbers and tuple(x[:, :tokens] for x in numbers))
    shown = shown if seen is None else shown & seen
    if window:
        plan = jax.jit(limit_window)(plan, window)
        position = np.arange(tokens)
        shown = shown & (position[:, None] - position < window)
    if shares == 1:
        yield shown, jax.tree.map(jnp.asarray, plan), inputs, numbers
        return
    for share in range(shares):
        mine = jax.tree.map(lambda x, share=share: jnp.asarray(x[share]), plan)
        parts = [jnp.split(x, shares, axis=2)[share] for x in inputs[:4]]
        heads = np.split(shown, shares, axis=1)[share]
        yield heads, mine, (*parts, None), numbers


@pytest.mark.parametrize("name", some_by_hand(CASES, CASES.keys() - QUICK))
def test_kernels_are_dense_attention_under_the_mask(monkeypatch, capfd, name):
    """Fails if a kernel leaves out, adds or races for anything."""
    case = CASES[name]
    monkeypatch.setattr(schedules, "NUM_SMS", case.get("programs", 2))
    if case.get("split"):
        monkeypatch.setattr(schedules, "MIN_SPLIT", 128)
        monkeypatch.setattr(schedules, "MAX_ITEM_FRACTION", 0.01)
    for of_device in make_case(**case):
        assert_dense(*of_device, case)
    assert "RACE" not in "".join(capfd.readouterr())


def assert_dense(mask, plan, inputs, segments, case):
    assert bool(plan.queries.num_slots and plan.keys.num_slots) == case.get(
        "split", False
    )
    *qkv, d_out, _ = inputs
    options = Options(qkv[0].shape[-1] ** -0.5, case.get("soft_cap", 0.0))
    tokens = qkv[0].shape[1]
    (out, lse), vjp = jax.vjp(
        functools.partial(attend, mask=mask, soft_cap=options.soft_cap),
        *(x.astype(jnp.float32) for x in qkv),
    )
    expected = vjp((d_out.astype(jnp.float32), jnp.zeros_like(lse)))
    padding = [(0, 0), (0, plan.queries.num_rows - tokens), (0, 0), (0, 0)]
    *qkv, d_out, averages = (jnp.pad(x, padding) for x in (*qkv, d_out, out))
    run = functools.partial(interpret, case.get("stages", 2), options)
    tiles = case.get("tiles", 1 if qkv[0].shape[-1] > 128 else 2)
    found, sums = run(forward, (*qkv, segments, plan.queries), tiles)
    delta = jnp.einsum("bshd,bshd->bhs", averages, d_out.astype(jnp.float32))
    backward = BackwardInputs(*qkv, d_out, sums, delta, segments)
    dq = run(backward_queries, (backward, plan.queries), tiles)
    dk, dv = run(backward_keys, (backward, plan.keys), tiles)
    np.testing.assert_allclose(sums[..., :tokens], lse, atol=1e-3, rtol=0)
    np.testing.assert_allclose(found[:, :tokens].astype(np.float32), out, atol=2e-2)
    for x, y in zip((dq, dk, dv), expected, strict=True):
        error = jnp.abs(x[:, :tokens].astype(jnp.float32) - y).max()
        assert error <= 1e-2 * jnp.abs(y).max()
    assert not found[:, tokens:].any()


def interpret(stages, options, kernel, args, tiles):
    how = tuning.Tuning(stages, tiles)
    params = InterpretGPUParams(detect_races=True)
    run = functools.partial(kernel, options=options, tuning=how, interpret=params)
    return jax.jit(lambda args: run(*args))(args)


BLOCKS, HEAD_SIZES = (16, 32, 64, 128), (64, 96, 128, 256)
PAIRS = {*zip(BLOCKS, HEAD_SIZES, strict=True), (128, 64)}
"""Blocks and sizes of heads whose kernels are lowered without masks, too."""
KERNELS = {"forward": forward, "dq": backward_queries, "dk and dv": backward_keys}


def variants():
    """Each block with each size of heads, and each kernel with each of both."""
    numbers = itertools.product(range(len(BLOCKS)), range(len(HEAD_SIZES)))
    for masks, (row, column) in itertools.product(("none", "all"), numbers):
        pair = BLOCKS[row], HEAD_SIZES[column]
        kernel = [*KERNELS][(row + column) % len(KERNELS)]
        by_hand = masks == "none" and pair not in PAIRS
        yield pytest.param(masks, *pair, kernel, marks=[pytest.mark.slow] * by_hand)


@pytest.mark.parametrize(("masks", "block", "head_size", "name"), [*variants()])
def test_variants_lower_for_cuda(masks, block, head_size, name):
    """Fails if a kernel asks for what Mosaic cannot do: copies, layouts, products."""
    everything = masks == "all"
    tokens = 4096 if block == 128 else 512
    num_heads, num_kv_heads = (8, 1) if everything else (4, 4)
    live = random_live((num_heads, tokens // block, tokens // block))
    layout = BlockLayout.from_dense(live, block=block, causal=everything)
    plan = make_plan(
        layout,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        segments=everything,
        mask=(lambda query, key: query - key < 100) if everything else None,
    )
    if everything:
        plan = jax.eval_shape(lambda plan: limit_window(plan, 100), plan)
    dtype = jnp.float16 if everything else jnp.bfloat16
    options = Options(0.1, 2.0 if everything else 0.0)
    q = jax.ShapeDtypeStruct((2, tokens, num_heads, head_size), dtype)
    k = jax.ShapeDtypeStruct((2, tokens, num_kv_heads, head_size), dtype)
    sums = jax.ShapeDtypeStruct((2, num_heads, tokens), jnp.float32)
    numbers = jax.ShapeDtypeStruct((2, tokens), jnp.int32)
    segments = (numbers, numbers) if everything else None
    inputs = q, k, k, segments
    if name != "forward":
        inputs = (BackwardInputs(q, k, k, q, sums, sums, segments),)
    side = plan.keys if name == "dk and dv" else plan.queries
    run = functools.partial(KERNELS[name], options=options)
    assert num_kernels(run, *inputs, side) >= 1


@pytest.mark.parametrize(
    ("kernel", "side"),
    [(forward, "queries"), (backward_queries, "queries"), (backward_keys, "keys")],
    ids=["forward", "dq", "dk and dv"],
)
def test_lowering_by_warpgroups_is_a_choice(kernel, side):
    layout = BlockLayout.from_dense(random_live((8, 8)), block=64, num_heads=2)
    x = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16)
    sums = jax.ShapeDtypeStruct((1, 2, 512), jnp.float32)
    inputs = (x, x, x, None)
    if kernel is not forward:
        inputs = (BackwardInputs(x, x, x, x, sums, sums, None),)
    arrays = *inputs, getattr(make_plan(layout), side)
    how = tuning.Tuning(warpgroup=True)
    run = functools.partial(kernel, options=Options(1.0), tuning=how)
    assert num_kernels(run, *arrays) == 1


def kernels_of(function, *arrays):
    """How often the lowered program of a function and its gradients runs a kernel."""
    return num_kernels(jax.value_and_grad(function, argnums=(0, 1, 2)), *arrays)


def total(function):
    return lambda *x: function(*x).astype(jnp.float32).sum()


def test_selected_blocks_lower_for_cuda(on_hopper):
    """Fails if the kernels ask for what a plan made on the device has not."""
    q = jax.ShapeDtypeStruct((2, 1, 256, 4, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 1, 256, 2, 64), jnp.bfloat16)
    chosen = jax.ShapeDtypeStruct((2, 4, 2, 1), jnp.int32)

    def attend(q, k, v, chosen):
        return sparse_attention(q, k, v, make_selected_plan(chosen, num_kv_heads=2))

    assert kernels_of(total(jax.vmap(attend)), q, k, k, chosen) == 3


def test_sequences_over_devices_lower_for_cuda(on_hopper):
    """Fails if the kernels cannot run what each device has gathered."""
    layout = BigBird(2, block=64).layout(512)
    plan = jax.tree.map(jnp.asarray, make_sequence_plan(layout, 2))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("sequence",))
    split = jax.sharding.PartitionSpec(None, "sequence")
    spread = jax.shard_map(
        functools.partial(sequence_attention, axis="sequence"),
        mesh=mesh,
        in_specs=(split, split, split, jax.sharding.PartitionSpec("sequence")),
        out_specs=split,
        check_vma=False,
    )
    x = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16)
    assert kernels_of(total(spread), x, x, x, plan) == 3


def test_kernels_run_in_any_program(on_hopper):
    """Fails if a transformation cannot hold the kernels, or repeats them unasked."""
    layout = BigBird(4, block=64, attention="unidirectional").layout(256)
    plan = make_plan(layout, num_kv_heads=2)
    q = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.bfloat16)

    def attend(q, k, v):
        return sparse_attention(q, k, v, plan)

    def loop(q, k, v):
        return jax.lax.scan(lambda q, _: (attend(q, k, v), None), q, length=3)[0]

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    rows = jax.sharding.PartitionSpec("data")
    spread = jax.shard_map(
        loop, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False
    )
    kept = jax.checkpoint_policies.save_only_these_names(RESIDUALS)
    several = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in (q, k, k)]
    assert kernels_of(total(spread), q, k, k) == 3
    assert kernels_of(jax.checkpoint(total(jax.vmap(attend))), *several) == 4
    assert kernels_of(jax.checkpoint(total(attend), policy=kept), q, k, k) == 3
