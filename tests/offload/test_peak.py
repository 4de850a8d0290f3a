"""The memory that a streamed step is said to take."""

import dataclasses
import functools

import jax
import pytest

from tests.support.offload import GPT, UNDER_BACKWARD, make_batch, make_config, start
from zjax.offload import train as offload
from zjax.offload import units
from zjax.run.plan_report import describe_peak
from zjax.sharding import plan as plans

SHARE = 8
"""Devices over which the batch is split."""


@pytest.fixture(autouse=True)
def _few_bytes_move(monkeypatch):
    monkeypatch.setattr(units, "AHEAD_BYTES", 0)
    monkeypatch.setattr(offload, "GROUP_BYTES", 0)


started = functools.cache(start)


def predict(num_layers=4, limit=0, inputs="device", changes=(), **zero):
    model = dataclasses.replace(GPT, num_layers=num_layers, activation_memory=inputs)
    run = started(make_config("pinned_host", model=model, zero=zero, **dict(changes)))
    run.step.executor.step.stream.limit = limit
    return run, run.step.predict_peak(make_batch(0))


def test_depth_costs_the_inputs_of_blocks_alone():
    """Fails if something else of every block is on the devices."""
    zero = {"parameter_memory": "pinned_host", "gradient_memory": "pinned_host"}
    changes = UNDER_BACKWARD  # no gradient waits
    (_, few), (run, many) = (predict(n, changes=changes, **zero) for n in (4, 8))
    tokens, name = make_batch(0)["tokens"], "residuals, then gradients"
    one = tokens.size // SHARE * GPT.embed_size * 4
    assert few.moment == many.moment == "backward"
    assert many.parts.pop(name) - few.parts.pop(name) == 4 * one
    rows = run.step.executor.step.rows.values()
    stay = [r.device_bytes for r in rows if r.is_on_device and "blocks" in r.path]
    assert max(stay) < plans.MIN_MOVED_BYTES
    small = many.parts.pop("stored state") - few.parts.pop("stored state")
    assert small == sum(stay) * 4 // 8
    assert many.parts == few.parts


@pytest.mark.parametrize("waits", [True, False])
def test_gradients_wait_on_the_devices_only_for_a_norm(waits):
    changes = {} if waits else UNDER_BACKWARD
    run, peak = predict(inputs="pinned_host", changes=changes, gradient_memory="device")
    rows = run.step.executor.step.backward.grad_rows
    grads = sum(row.device_bytes for row in jax.tree.leaves(rows))
    assert peak.moment == "backward"
    assert (peak.parts["residuals, then gradients"] >= grads) is waits


def test_gradients_that_wait_for_the_next_step_are_always_there():
    """Fails if a delayed update is said to need no room for what is pending."""
    run, late = predict(delay_updates_from=1)
    _, at_once = predict(changes=UNDER_BACKWARD)
    rows = run.step.executor.step.backward.grad_rows
    grads = sum(row.device_bytes for row in jax.tree.leaves(rows))
    assert late.parts["pending gradients"] == grads
    assert at_once.parts["pending gradients"] == 0
    assert late.total == at_once.total + grads


def test_parameters_rest_where_the_plan_says():
    (other, here), (run, away) = predict(), predict(parameter_memory="pinned_host")
    rows = zip(*(jax.tree.leaves(x.plan.compute) for x in (other, run)), strict=True)
    moved = [pair for pair in rows if pair[1].memory == "pinned_host"]
    freed, resting = (sum(pair[i].device_bytes for pair in moved) for i in (0, 1))
    assert here.parts["stored state"] - away.parts["stored state"] == freed > resting
    blocks = 3 * resting // 4
    assert here.parts["prefetched blocks"] == 0
    assert away.parts["prefetched blocks"] == blocks


def test_room_for_groups_is_counted():
    (run, least), (_, more) = predict(), predict(limit=10_000)
    largest = max(run.step.executor.step.group_bytes)
    assert least.parts["groups in transfer"] == largest
    assert more.parts["groups in transfer"] == 10_000
    title, *table = describe_peak(least, "gpu").splitlines()
    assert title == (
        "most that a step compiled for GPUs takes, predicted for the program: "
        f"{least.moment}"
    )
    assert any("groups in transfer" in line for line in table)
    title, *of_cpus = describe_peak(least, "cpu").splitlines()
    assert title.startswith("most that a step compiled for CPUs takes, ")
    assert of_cpus == [
        *table,
        "A program for CPUs keeps the scores of attention and computes bf16 in f32: "
        "its",
        "temporaries are not those of a program for GPUs.",
    ]


def test_all_streams_are_counted():
    """Fails if sums or inputs that rest on the host are forgotten on their way."""
    run, peak = predict(
        inputs="pinned_host",
        gradient_memory="pinned_host",
        parameter_memory="pinned_host",
        changes={"num_microbatches": 2},
    )
    passes = run.step.executor.step.backward
    block = sum(row.device_bytes for row in passes.sums.rows[0])
    assert peak.parts["sums of gradients"] >= 3 * block
    one = make_batch(0)["tokens"].size // SHARE // 2 * GPT.embed_size * 4
    assert peak.parts["inputs in transfer"] >= one
