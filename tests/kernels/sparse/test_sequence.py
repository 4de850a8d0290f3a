"""Sequences and heads over devices equal those on one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.kernels.sparse.dense import attend, make_inputs, mask_of
from tests.kernels.sparse.test_plan import random_live, random_mask
from tests.support.refusals import value_error
from zjax_kernels.sparse import (
    BigBird,
    BlockLayout,
    LocalSlidingWindow,
    make_plan,
    make_sequence_plan,
    sequence,
    sequence_attention,
    sparse_attention,
    sparse_attention_gradients,
)

AXIS = "sequence"
RULES = {
    "window": (LocalSlidingWindow(4, block=64), 1),
    "bigbird, causal": (BigBird(4, block=32, attention="unidirectional", seed=1), 4),
    "bigbird, heads differ": (BigBird(4, block=128, different_layout_per_head=True), 2),
}


def on_devices(function, plan, num_devices):
    devices = jax.devices()[:num_devices]
    mesh = jax.sharding.Mesh(np.array(devices), (AXIS,))
    split = P(None, AXIS)
    arrays = (split,) * 3
    return jax.jit(
        jax.shard_map(
            functools.partial(function, axis=AXIS),
            mesh=mesh,
            in_specs=(*arrays, jax.tree.map(lambda _: P(AXIS), plan), (split, split)),
            out_specs=split,
            check_vma=False,
        )
    )


@pytest.mark.parametrize("rule", RULES)
def test_parts_are_the_whole(rule):
    """Fails if a device lacks a block, sees a wrong one, or loses its gradient."""
    rule, num_kv_heads = RULES[rule]
    layout = rule.layout(1024)
    plan = make_sequence_plan(layout, 4, num_kv_heads=num_kv_heads, segments=True)
    *inputs, d_out, _ = make_inputs(layout, batch=2, num_kv_heads=num_kv_heads)
    rng = np.random.default_rng(0)
    segments = (np.sort(rng.integers(0, 3, (2, 1024))).astype(np.int32),) * 2

    def run(q, k, v, plan, segments, axis):
        return sequence_attention(q, k, v, plan, axis=axis, segment_ids=segments)

    spread = on_devices(run, plan, 4)
    found, vjp = jax.vjp(lambda *x: spread(*x, plan, segments), *inputs)
    mask = mask_of(layout, segments)
    expected, dense_vjp = jax.vjp(lambda *x: attend(*x, mask)[0], *inputs)
    pairs = zip((found, *vjp(d_out)), (expected, *dense_vjp(d_out)), strict=True)
    for x, y in pairs:
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_a_window_costs_its_edges():
    """Fails if whole sequences are gathered, or blocks that nobody sees are sent."""
    layout = LocalSlidingWindow(4, block=64, num_sliding_window_blocks=5).layout(4096)
    plan = make_sequence_plan(layout, 8)
    assert plan.distances == (1,)
    assert plan.receivers == ((1, 2, 3, 4, 5, 6, 7),)  # none comes before the first
    assert plan.num_blocks_sent == 2

    def run(q, k, v, plan, segments, axis):
        return sequence_attention(q, k, v, plan, axis=axis)

    x = jax.ShapeDtypeStruct((1, 4096, 4, 16), jnp.float32)
    numbers = jax.ShapeDtypeStruct((1, 4096), jnp.int32)
    spread = on_devices(run, plan, 8)
    text = spread.lower(x, x, x, plan, (numbers, numbers)).compile().as_text()
    assert "all-gather" not in text
    assert (
        text.count(" collective-permute(") + text.count("collective-permute-start(")
        == 2
    )
    assert "f32[1,2,64,4,16]" in text


def test_one_global_block_is_one_block():
    live = np.eye(32, dtype=bool)
    live[:, 0] = True
    layout = BlockLayout.from_dense(live, block=64, num_heads=1)
    assert make_sequence_plan(layout, 8).num_blocks_sent == 7


def test_gradients_of_a_block_that_all_see_are_summed_in_float32():
    """Fails if each device that saw it rounds the sum to bfloat16 once more."""
    distances, everyone = tuple(range(1, 8)), tuple(range(8))
    halo = sequence._Halo(AXIS, 8, distances, (everyone,) * 7, 1)

    def own(gradient, sends):
        gather = functools.partial(sequence._gather, halo, sends=sends)
        return jax.vjp(gather, jnp.zeros((1, 1, 1), jnp.bfloat16))[1](gradient)[0]

    mesh = jax.sharding.Mesh(np.array(jax.devices()), (AXIS,))
    split = P(None, AXIS)
    places = {"in_specs": (split, P()), "out_specs": split}
    run = jax.shard_map(own, mesh=mesh, **places, check_vma=False)
    ones = jnp.ones((1, 8, 8, 1), jnp.bfloat16).at[:, :, 0].set(256)
    sends = (jnp.zeros(1, jnp.int32),) * 7
    found = jax.jit(run)(ones.reshape(1, 64, 1), sends)
    np.testing.assert_array_equal(found.astype(np.float32), 264)  # 263, rounded once


def test_attention_outside_of_a_mesh_and_other_plans():
    """Fails if the error does not name the argument."""
    layout = LocalSlidingWindow(4, block=64).layout(1024)
    x = jnp.zeros((1, 1024, 4, 16))
    with value_error(
        "axis='sequence' is not an axis of this program; call it inside jax.shard_map "
        "over a mesh that has it"
    ):
        sequence_attention(x, x, x, make_sequence_plan(layout, 1), axis=AXIS)
    with value_error(
        "plan=Plan is not a plan of a sequence; give make_sequence_plan(...)"
    ):
        sequence_attention(x, x, x, make_plan(layout), axis=AXIS)


def test_devices_that_do_not_share_a_sequence_are_refused():
    layout = LocalSlidingWindow(4, block=64).layout(1024)
    with value_error("num_devices='2' is not an integer >= 1; give 1 or more"):
        make_sequence_plan(layout, "2")
    with value_error(
        "layout=(16, 16) blocks do not divide into 5 equal parts of a sequence; use a "
        "length that divides"
    ):
        make_sequence_plan(layout, 5)
    with value_error(
        "num_devices=16 leave 64 tokens to a device, no multiple of 128; use fewer "
        "devices"
    ):
        make_sequence_plan(layout, 16)


def test_a_plan_for_other_devices_is_refused():
    """Fails if each device could attend to its own tokens alone."""
    layout = LocalSlidingWindow(4, block=64).layout(1024)
    plan = make_sequence_plan(layout, 1)
    x = jax.ShapeDtypeStruct((1, 1024, 4, 16), jnp.float32)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), (AXIS,))
    spread = jax.shard_map(
        functools.partial(sequence_attention, axis=AXIS),
        mesh=mesh,
        in_specs=(P(None, AXIS),) * 3 + (P(),),
        out_specs=P(None, AXIS),
        check_vma=False,
    )
    with value_error(
        "num_devices=1 is not that of axis 'sequence', 4; make a plan for it"
    ):
        jax.eval_shape(spread, x, x, x, plan)


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
    with value_error(
        "head_shards=2 are stacked in one plan; split its arrays along their first "
        "dim, as by jax.shard_map"
    ):
        sparse_attention(*inputs, make_plan(LAYOUT, head_shards=2))
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
        ({"head_shards": 0}, "head_shards=0 is not an integer >= 1; give 1 or more"),
    ],
)
def test_heads_that_do_not_divide(make, sizes, message):
    with value_error(message):
        make(LAYOUT, **sizes)


KEYS = 96
WHOLE_LAYOUT = BlockLayout.from_dense(np.ones((3, 6), bool), block=32, num_heads=4)
PART = BlockLayout.from_dense(np.ones((3, 3), bool), block=32, num_heads=4)


def make_masks():
    rng = np.random.default_rng(0)
    documents = np.sort(rng.integers(0, 3, (2, KEYS)))
    segments = documents, np.concatenate([documents, documents], axis=1)
    return segments, rng.random((2, 2 * KEYS)) < 0.8


@pytest.mark.parametrize(
    ("options", "masked"),
    [({}, False), ({"scale": 0.7}, True), ({"soft_cap": 2.0}, True)],
    ids=["plain", "scaled, masks", "capped, masks"],
)
def test_parts_add_up(options, masked):
    """Fails if an option that scores have is none that their gradients have."""
    segments, key_mask = make_masks() if masked else (None, None)
    mask = mask_of(WHOLE_LAYOUT, segments, key_mask)
    q, k, v, d_out, _ = make_inputs(WHOLE_LAYOUT, num_kv_heads=2)
    (out, lse), vjp = jax.vjp(lambda *x: attend(*x, mask, **options), q, k, v)
    expected = vjp((d_out, jnp.zeros_like(lse)))
    delta = jnp.einsum("bshd,bshd->bhs", out, d_out)
    plan = make_plan(PART, num_kv_heads=2)

    def part(keys):
        masks = {}
        if masked:
            masks["segment_ids"] = segments[0], segments[1][:, keys]
            masks["key_mask"] = key_mask[:, keys]
        return sparse_attention_gradients(
            q, k[:, keys], v[:, keys], plan, d_out, lse, delta, **options, **masks
        )

    (dq, *first), (more, *second) = part(slice(KEYS)), part(slice(KEYS, None))
    pairs = zip(first, second, strict=True)
    found = dq + more, *(jnp.concatenate(each, axis=1) for each in pairs)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("d_out", (2, 90, 4, 16), (2, 96, 4, 16)),
        ("lse", (2, 96, 4), (2, 4, 96)),
        ("delta", (1, 4, 96), (2, 4, 96)),
    ],
)
def test_other_shapes_are_refused(name, shape, expected):
    """Fails if what is missing is filled up, or what is one is repeated."""
    q, k, v, d_out, sums = make_inputs(PART)
    given = {"d_out": d_out, "lse": sums, "delta": sums, name: jnp.zeros(shape)}
    with value_error(
        f"{name}.shape={shape} is not {expected}, as the queries need; give all queries"
    ):
        sparse_attention_gradients(q, k, v, make_plan(PART), **given)
    with value_error("delta=NoneType is not an array; give one of shape (2, 4, 96)"):
        sparse_attention_gradients(q, k, v, make_plan(PART), d_out, sums, None)
