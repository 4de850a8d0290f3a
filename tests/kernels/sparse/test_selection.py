"""Blocks and windows that are known while a program runs, and the memory it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.sparse.decoding import decode
from tests.kernels.sparse.dense import attend, make_inputs, mask_of
from tests.kernels.sparse.test_plan import random_live
from tests.support.refusals import value_error
from tests.support.trees import assert_close
from zjax_kernels.sparse import (
    BigBird,
    BlockLayout,
    limit_window,
    make_plan,
    make_selected_plan,
    sparse_attention,
)
from zjax_kernels.sparse import schedule as schedules
from zjax_kernels.sparse.chunks import TILE


def select(num_blocks, width, heads=4, seed=0):
    """int32[heads, num_blocks, width], some of them none."""
    rng = np.random.default_rng(seed)
    shape = heads, num_blocks
    found = np.stack(
        [rng.permutation(num_blocks)[:width] for _ in range(np.prod(shape))]
    )
    found = np.where(rng.random(found.shape) < 0.2, -1, found)
    return found.reshape(*shape, width).astype(np.int32)


def layout_of(selected, causal):
    heads, num_blocks, _ = selected.shape
    live = np.zeros((heads, num_blocks, num_blocks + 1), bool)
    np.put_along_axis(live, selected, True, axis=2)  # -1 is the column too many
    return BlockLayout.from_dense(live[..., :-1], block=128, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_plans_say_what_was_selected(causal, num_kv_heads):
    """Fails if a block is lost, added, cut wrongly or counted as full."""
    selected = select(6, 4)
    make = jax.jit(make_selected_plan, static_argnames=("num_kv_heads", "causal"))
    plan = make(selected, num_kv_heads=num_kv_heads, causal=causal)
    plan = jax.tree.map(np.asarray, plan)
    expected = mask_of(layout_of(selected, causal))[0]
    np.testing.assert_array_equal(decode(plan.queries), expected)
    keys = decode(plan.keys).reshape(num_kv_heads, 768, -1, 768)
    keys = keys.transpose(0, 2, 3, 1).reshape(4, 768, 768)
    np.testing.assert_array_equal(keys, expected)


def test_each_sequence_has_its_own_blocks():
    """Fails if a sequence attends to what another one selected, or in its gradient."""
    selected = np.stack([select(3, 2, seed=seed) for seed in range(2)])
    layouts = [layout_of(each, True) for each in selected]
    *inputs, d_out, _ = make_inputs(layouts[0], num_kv_heads=2)

    @jax.jit
    @jax.vmap
    def run(q, k, v, selected):
        plan = make_selected_plan(selected, num_kv_heads=2, causal=True)
        return sparse_attention(q[None], k[None], v[None], plan)[0]

    found, vjp = jax.vjp(lambda *x: run(*x, selected), *inputs)
    mask = np.concatenate([mask_of(layout) for layout in layouts])
    expected, dense_vjp = jax.vjp(lambda *x: attend(*x, mask)[0], *inputs)
    pairs = zip((found, *vjp(d_out)), (expected, *dense_vjp(d_out)), strict=True)
    for x, y in pairs:
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_repeats_and_what_is_no_block_count_for_nothing():
    """Fails if a block that a router names twice has twice the weight."""
    selected = select(5, 3)
    repeated = np.concatenate([selected[..., ::-1], selected], axis=2)
    repeated[:, 0, 0], repeated[:, 1, 1] = 5, -7
    expected = np.where((repeated < 0) | (repeated > 4), -1, repeated)
    make = jax.jit(jax.vmap(lambda x: make_selected_plan(x, num_kv_heads=2)))
    plan = jax.tree.map(lambda x: np.asarray(x[0]), make(repeated[None]))
    expected = mask_of(layout_of(expected, False))[0]
    np.testing.assert_array_equal(decode(plan.queries), expected)
    assert decode(plan.keys).sum() == expected.sum()


@pytest.mark.parametrize(
    ("selected", "num_kv_heads", "message"),
    [
        ([[[0]]], 1, "selected=list is not an array; give one of shape [H, n, k]"),
        (
            np.zeros((2, 1), np.int32),
            1,
            "selected.shape=(2, 1) does not have 3 dims; give one of shape [H, n, k]",
        ),
        (
            np.zeros((2, 2, 1), np.float32),
            1,
            "selected.dtype=float32 is not an integer dtype; number the blocks",
        ),
        (
            np.zeros((2, 2, 0), np.int32),
            1,
            "selected.shape=(2, 2, 0) has an empty dim; give one or more of each",
        ),
        (
            np.zeros((2, 2, 1), np.int32),
            1.0,
            "num_kv_heads=1.0 is not an integer >= 1; give 1 or more",
        ),
        (
            np.zeros((4, 2, 1), np.int32),
            3,
            "num_kv_heads=3 does not divide the 4 heads of what is selected; give a "
            "divisor",
        ),
    ],
    ids=["list", "two dims", "no integers", "no choice", "no number", "no divisor"],
)
def test_selections_that_are_refused(selected, num_kv_heads, message):
    with value_error(message):
        make_selected_plan(selected, num_kv_heads=num_kv_heads)


WINDOWS = (1, 63, 64, 130, 1000)


def causal_layout(block, tokens, heads, *, dense):
    rows = tokens // block
    live = random_live((heads, rows, rows)) | dense
    return BlockLayout.from_dense(live, block=block, num_heads=heads, causal=True)


def in_window(tokens, window):
    position = np.arange(tokens)
    return position[:, None] - position[None] < window


@pytest.mark.parametrize(
    ("block", "num_kv_heads", "dense", "split"),
    [(64, 1, True, True), (16, 2, False, False), (128, 2, True, False)],
)
def test_each_window_is_its_mask_in_one_program(
    monkeypatch, block, num_kv_heads, dense, split
):
    """Values and gradients; fails for a window that is longer or shorter by one."""
    if split:
        monkeypatch.setattr(schedules, "NUM_SMS", 2)
        monkeypatch.setattr(schedules, "MIN_SPLIT", 128)
        monkeypatch.setattr(schedules, "MAX_ITEM_FRACTION", 0.01)
    layout = causal_layout(block, 384, 2, dense=dense)
    plan = make_plan(layout, num_kv_heads=num_kv_heads)
    assert bool(plan.queries.num_slots) == split
    q, k, v, d_out, _ = make_inputs(layout, batch=1, num_kv_heads=num_kv_heads)

    def gradients(run, *inputs):
        out, vjp = jax.vjp(run, *inputs)
        return out, vjp(d_out)

    @jax.jit
    def windowed(window):
        limited = limit_window(plan, window)
        return gradients(lambda *x: sparse_attention(*x, limited), q, k, v)

    for window in WINDOWS:
        mask = mask_of(layout) & in_window(384, window)
        expected = gradients(lambda *x, mask=mask: attend(*x, mask)[0], q, k, v)
        assert_close(windowed(window), expected, atol=2e-5)
    assert windowed._cache_size() == 1


def test_a_window_of_all_tokens_changes_no_bit():
    layout = causal_layout(64, 384, 2, dense=True)
    plan, (q, k, v, *_) = make_plan(layout), make_inputs(layout)
    run = jax.jit(lambda plan: sparse_attention(q, k, v, plan))
    np.testing.assert_array_equal(run(plan), run(jax.jit(limit_window)(plan, 384)))


@pytest.mark.parametrize("window", [1, 64, 130, 2048])
def test_chunks_outside_of_the_window_are_not_visited(window):
    """Fails if the window only masks: the kernels loop over the chunks of the items."""
    tokens = 2048
    plan = make_plan(causal_layout(64, tokens, 2, dense=True))
    position = np.arange(tokens)
    seen = (position[:, None] >= position) & in_window(tokens, window)
    limited = jax.jit(limit_window)(plan, window)
    for schedule, pairs in ((limited.queries, seen), (limited.keys, seen.T)):
        cut = pairs.reshape(tokens // TILE, TILE, -1, schedule.chunk)
        visited = cut.any(axis=(1, 3)).sum(axis=1)
        items = np.asarray(schedule.items[0])
        counts = np.bincount(items[:, 0], items[:, 2], minlength=len(visited))
        np.testing.assert_array_equal(counts, visited)
        unmasked = cut.all(axis=(1, 3)).sum(axis=1)
        full = np.bincount(items[:, 0], items[:, 3], minlength=len(visited))
        np.testing.assert_array_equal(full, unmasked)


def test_a_plan_without_a_past_is_refused():
    layout = BlockLayout.from_dense(np.ones((1, 1), bool), block=16, num_heads=1)
    with pytest.raises(ValueError, match="has no past") as error:
        limit_window(make_plan(layout), 8)
    assert str(error.value) == (
        "plan.queries.causal=False has no past; "
        "use BlockLayout.from_dense(..., causal=True)"
    )


@pytest.mark.parametrize("passes", ["forward", "both"])
def test_memory_per_token_is_that_of_a_short_sequence(passes):
    """Fails if scores of all pairs exist at a time, or those of all blocks."""
    short, long = (bytes_per_token(length, passes) for length in (1024, 8192))
    assert long <= short


def bytes_per_token(length, passes):
    plan = make_plan(BigBird(2, block=64, attention="unidirectional").layout(length))
    x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)

    def total(q, k, v):
        return sparse_attention(q, k, v, plan, implementation="reference").sum()

    run = total if passes == "forward" else jax.grad(total, argnums=(0, 1, 2))
    memory = jax.jit(run).lower(x, x, x).compile().memory_analysis()
    return memory.temp_size_in_bytes / length
