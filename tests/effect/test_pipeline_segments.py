"""What the stages of a line of unlike blocks hold, send and compute."""

import collections

import jax
import pytest

import zjax
from tests.support import two_segments
from zjax.jaxprs.program import walk
from zjax.observe.collectives import list_collectives
from zjax.sharding import placement

MICROBATCHES, STAGES = 2, 2
ROWS = two_segments.ROWS // MICROBATCHES
SLOTS = {16: 1, 24: 4}
"""Of one narrow block and seven wide ones, by the width of their feed-forward."""


@pytest.fixture
def step(monkeypatch):
    run = zjax.initialize(
        two_segments.resized(monkeypatch, 1, 7),
        None,
        None,
        two_segments.make_batch(),
        {
            "mesh": {"pipeline": STAGES},
            "zero": {"stage": 0},
            "num_microbatches": MICROBATCHES,
            "precision": {"compute_dtype": "float32"},
        },
        devices=jax.devices()[:STAGES],
    )
    return run.step


def abstract(step):
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), two_segments.make_batch()
    )
    return placement.abstract_tree(step.executor.state_plan), batch


def test_a_stage_holds_its_share_of_each_segment(step):
    """Fails if stages hold the blocks of others, beside one empty slot in two."""
    for row in jax.tree.leaves(step.executor.state_plan.master):
        stacked = row.stored_shape[0] // STAGES if row.num_layers else 0
        if stacked:
            assert stacked == SLOTS[max(row.shape[1:])]
            block = row.shape[1] * row.shape[2] * 4
            assert row.device_bytes == stacked * block


def test_a_stage_computes_its_slots_alone(step):
    """Fails if each stage computes all blocks, or all of one segment."""
    with jax.set_mesh(step.mesh):
        traced = jax.make_jaxpr(step.programs["evaluate"])(*abstract(step))
    found = collections.Counter(
        each.outvars[0].aval.shape[-1]
        for each in walk(traced)
        if each.primitive.name == "dot_general"
        and each.outvars[0].aval.shape[:-1] == (ROWS,)
    )
    assert {width: found[width] for width in SLOTS} == SLOTS


def test_stages_send_streams_and_no_weights(step):
    """Fails if blocks that are stored where they run are sent all the same."""
    _, batch = abstract(step)
    text = step.compile(batch).as_text()
    stream = ROWS * two_segments.WIDTH
    sent = [each for each in list_collectives(text) if each.elements > 8]
    assert sent
    assert max(each.elements for each in sent if "permute" in each.op) == stream
    # Of embedding and head, whose gradients the stages share.
    assert max(each.elements for each in sent) <= stream + two_segments.WIDTH
    assert not [each for each in sent if each.op in ("all-gather", "all-to-all")]
