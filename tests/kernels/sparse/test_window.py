"""Windows that are known on the device: one program, and nothing outside is visited."""

import jax
import numpy as np
import pytest

from tests.kernels.sparse.dense import attend, make_inputs, mask_of
from tests.kernels.sparse.test_plan import random_live
from tests.support.trees import assert_close
from zjax_kernels.sparse import BlockLayout, limit_window, make_plan, sparse_attention
from zjax_kernels.sparse import schedule as schedules
from zjax_kernels.sparse.chunks import TILE

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
