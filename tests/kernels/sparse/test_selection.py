"""Blocks that are selected while a program runs are the blocks that are attended to."""

import jax
import numpy as np
import pytest

from tests.kernels.sparse.decoding import decode
from tests.kernels.sparse.dense import attend, make_inputs, mask_of
from zjax_kernels.sparse import (
    BlockLayout,
    make_selected_plan,
    sparse_attention,
)


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
        (
            [[[0]]],
            1,
            "selected=list is not an array; give one of shape [H, n, k]",
        ),
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
    with pytest.raises(ValueError) as caught:
        make_selected_plan(selected, num_kv_heads=num_kv_heads)
    assert str(caught.value) == message
