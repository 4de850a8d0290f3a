"""What a plan says that a step moves, against what it moves."""

import collections
import dataclasses

import jax
import pytest

from tests.support.offload import (
    GPT,
    UNDER_BACKWARD,
    make_batch,
    make_config,
    start,
    train,
)
from zjax.estimate import tables
from zjax.estimate.tables import traffic_of_step
from zjax.run.fit import offloaded_inputs
from zjax.sharding import describe, memory
from zjax.storage import move as moves

INPUTS = UNDER_BACKWARD | {
    "model": dataclasses.replace(GPT, activation_memory="pinned_host")
}


@pytest.mark.parametrize(
    ("stage", "number", "changes"),
    [
        pytest.param(1, 1, {}, id="one microbatch, clipped"),
        pytest.param(1, 2, INPUTS, id="two microbatches, inputs of blocks"),
        pytest.param(3, 2, {}, id="stage 3, two microbatches, clipped"),
    ],
)
def test_what_a_step_moves_is_told(monkeypatch, stage, number, changes):
    """Fails if a pass over the parameters or a sum of gradients is not counted, or
    blocks come up whole to each device."""
    away = {"parameter_memory": "pinned_host", "gradient_memory": "pinned_host"}
    precision = changes.get("precision", {}) | {"compute_dtype": "bfloat16"}
    changes = changes | {"precision": precision, "zero": away}
    config = make_config("pinned_host", stage, num_microbatches=number, **changes)
    run = start(config)
    step = run.step.executor.step
    monkeypatch.setattr(step.stream, "limit", 1)
    moved, send = collections.Counter(), moves.send

    def watched(x, place):
        moved[place.memory_kind] += x.addressable_shards[0].data.nbytes
        return send(x, place)

    monkeypatch.setattr(moves, "send", watched)
    train(run, 1)
    inputs = offloaded_inputs(run.model, run.plan, config, make_batch(0))
    told = traffic_of_step(run.plan, config, inputs)
    kinds = ["state", "parameters in use", "gradients"]
    assert [x.what for x in told] == kinds + ["inputs of blocks"] * bool(inputs)
    stays = step.backward.residual_bytes if step.update.waits else 0
    for way, name in (("device", "up"), ("pinned_host", "down")):
        everything = sum(getattr(x, name) for x in told)
        assert everything - stays <= moved[way] <= everything
    resting = memory.stored_bytes(run.plan).host
    assert sum(x.stored for x in told[:2]) == resting


def test_what_a_step_moves_is_shown():
    run = start(make_config("pinned_host"))
    text = tables.describe_memories(run.plan, run.config)
    moved = sum(
        row.device_bytes
        for row in jax.tree.leaves((run.plan.master, run.plan.opt_state))
        if row.memory == "pinned_host"
    )
    assert text.count(describe.format_bytes(moved)) == 3  # rests, up and down
    assert "\nat the 42.5 GB/s each way of an H200 " in text
    other = start(make_config("device"))
    assert tables.describe_memories(other.plan, other.config) == ""


@pytest.mark.parametrize(
    ("stage", "shares"),
    [(0, 1), (3, 8)],
)
def test_blocks_rest_split_over_the_devices(stage, shares):
    """Fails if every device keeps, and brings up, all of a block of its own."""
    config = make_config("pinned_host", stage, zero={"parameter_memory": "pinned_host"})
    run = start(config)
    weights = run.state.params["blocks"]["mlp"]["up"]["kernel"][0]
    assert weights.sharding.memory_kind == "pinned_host"
    assert weights.size == shares * weights.addressable_shards[0].data.size
