"""A sequence over devices equals the sequence on one, and sends what is seen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.kernels.sparse.dense import attend, make_inputs, mask_of
from zjax_kernels.sparse import (
    BigBird,
    BlockLayout,
    LocalSlidingWindow,
    make_plan,
    make_sequence_plan,
    sequence,
    sequence_attention,
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


@pytest.mark.parametrize("number", ["2", 1.0, 0])
def test_numbers_of_devices_that_are_none(number):
    with pytest.raises(ValueError) as caught:
        make_sequence_plan(LocalSlidingWindow(4, block=64).layout(1024), number)
    assert str(caught.value) == (
        f"num_devices={number!r} is not an integer >= 1; give 1 or more"
    )


def test_attention_outside_of_a_mesh_and_other_plans():
    """Fails if the error does not name the argument."""
    layout = LocalSlidingWindow(4, block=64).layout(1024)
    x = jnp.zeros((1, 1024, 4, 16))
    with pytest.raises(ValueError) as caught:
        sequence_attention(x, x, x, make_sequence_plan(layout, 1), axis=AXIS)
    assert str(caught.value) == (
        "axis='sequence' is not an axis of this program; call it inside jax.shard_map "
        "over a mesh "
        "that has it"
    )
    with pytest.raises(ValueError) as caught:
        sequence_attention(x, x, x, make_plan(layout), axis=AXIS)
    assert str(caught.value) == (
        "plan=Plan is not a plan of a sequence; give make_sequence_plan(...)"
    )


def test_refusals():
    layout = LocalSlidingWindow(4, block=64).layout(1024)
    with pytest.raises(ValueError) as caught:
        make_sequence_plan(layout, 5)
    assert str(caught.value) == (
        "layout=(16, 16) blocks do not divide into 5 equal parts of a sequence; use a "
        "length that divides"
    )
    with pytest.raises(ValueError) as caught:
        make_sequence_plan(layout, 16)
    assert str(caught.value) == (
        "num_devices=16 leave 64 tokens to a device, no multiple of 128; use fewer "
        "devices"
    )


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
    with pytest.raises(ValueError) as caught:
        jax.eval_shape(spread, x, x, x, plan)
    assert str(caught.value) == (
        "num_devices=1 is not that of axis 'sequence', 4; make a plan for it"
    )
