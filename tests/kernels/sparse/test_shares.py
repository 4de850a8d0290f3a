"""Heads that devices share: each has the work of its own, and of no other."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.kernels.sparse.dense import make_inputs
from tests.kernels.sparse.test_plan import random_live, random_mask
from zjax_kernels.sparse import (
    BlockLayout,
    make_plan,
    make_sequence_plan,
    sparse_attention,
)

LAYOUT = BlockLayout.from_dense(random_live((4, 8, 8)), block=32)


def test_each_device_has_the_work_of_its_heads():
    """Fails if a device computes heads that it does not have, or another's patterns."""
    plan = make_plan(LAYOUT, num_kv_heads=2, head_shards=2)
    for device in range(2):
        mine = jax.tree.map(lambda x, device=device: x[device], plan)
        for schedule, num_heads in ((mine.queries, 2), (mine.keys, 1)):
            order = schedule.order[: schedule.ends[-1]]
            assert schedule.num_heads == num_heads
            assert set(order[:, 0].tolist()) == set(range(num_heads))
            patterns = dict(order[:, :2].tolist())
            assert [patterns[head] for head in range(num_heads)] == [
                *schedule.head_patterns
            ]


def over_heads(inputs, plan):
    """Attention of two devices that share the heads."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tensor",))
    heads = P(None, None, "tensor")
    spread = jax.shard_map(
        sparse_attention,
        mesh=mesh,
        in_specs=(heads, heads, heads, P("tensor")),
        out_specs=heads,
        check_vma=False,
    )
    return jax.jit(spread)(*inputs, plan)


def test_shares_are_the_whole():
    """Fails if a device takes another's pattern."""
    *inputs, _, _ = make_inputs(LAYOUT, num_kv_heads=2)
    expected = sparse_attention(*inputs, make_plan(LAYOUT, num_kv_heads=2))
    plan = make_plan(LAYOUT, num_kv_heads=2, head_shards=2)
    np.testing.assert_allclose(over_heads(inputs, plan), expected, atol=1e-6)


def test_devices_with_the_same_patterns_have_the_same_plan():
    """Fails if what is alike is planned once for each device."""
    layout = BlockLayout.from_dense(np.ones((4, 4), bool), block=64, num_heads=4)
    first, *others = layout.split_heads(4)
    assert all(other is first for other in others)
    plan = make_plan(layout, head_shards=4)
    jax.tree.map(
        np.testing.assert_array_equal,
        *(jax.tree.map(lambda x, i=i: x[i], plan) for i in (0, 3)),
    )


@pytest.mark.parametrize("hides", ["some heads", "all heads"])
def test_masks_of_tokens_on_devices_that_share_heads(hides):
    """Fails if a device without a mask in its blocks has no room for that of others."""
    mask = random_mask((256, 256))
    live = np.ones((4, 8, 8), bool)
    if hides == "some heads":  # blocks that the mask leaves whole
        live[2:] = np.eye(8, dtype=bool)
        mask |= np.kron(np.eye(8, dtype=bool), np.ones((32, 32), bool))
    layout = BlockLayout.from_dense(live, block=32)
    *inputs, _, _ = make_inputs(layout, batch=1)
    expected = sparse_attention(*inputs, make_plan(layout, mask=mask))
    plan = make_plan(layout, mask=mask, head_shards=2)
    np.testing.assert_allclose(over_heads(inputs, plan), expected, atol=1e-6)


def test_plans_of_others_are_refused():
    """Fails if a device could run heads that it does not have."""
    *inputs, _, _ = make_inputs(LAYOUT, batch=1)
    with pytest.raises(ValueError) as caught:
        sparse_attention(*inputs, make_plan(LAYOUT, head_shards=2))
    assert str(caught.value) == (
        "head_shards=2 are stacked in one plan; split its arrays along their first "
        "dim, as by "
        "jax.shard_map"
    )
    plan = make_plan(LAYOUT)
    half = [
        dataclasses.replace(x, head_patterns=x.head_patterns[:2])
        for x in (plan.queries, plan.keys)
    ]
    plan = dataclasses.replace(plan, queries=half[0], keys=half[1])
    with pytest.raises(ValueError, match=r"q.shape=\(1, 256, 2, 16\) is not"):
        sparse_attention(*(x[:, :, :2] for x in inputs), plan)


@pytest.mark.parametrize(
    "make", [make_plan, lambda *x, **y: make_sequence_plan(*x, 2, **y)]
)
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"head_shards": 3},
            "head_shards=3 does not divide the 4 heads of the layout; use a divisor",
        ),
        (
            {"head_shards": 4, "num_kv_heads": 2},
            "head_shards=4 does not divide num_kv_heads=2; use a divisor",
        ),
        (
            {"head_shards": 0},
            "head_shards=0 is not an integer >= 1; give 1 or more",
        ),
    ],
)
def test_heads_that_do_not_divide(make, sizes, message):
    with pytest.raises(ValueError) as caught:
        make(LAYOUT, **sizes)
    assert str(caught.value) == message
