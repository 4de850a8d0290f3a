"""Counts of a step cover its whole batch once, and move the bias once."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zjax
from tests.support import totals
from zjax.errors import ModelError, PlanError
from zjax.sharding import plan as plans

OFFLOAD = {"kind": "pinned_host", "parameter_memory": "pinned_host"}
HOST = {"offload": OFFLOAD}
PIPELINE = {"mesh": {"pipeline": 2, "data": 4}}
PATHS = {
    "one device": (1, {"zero": {"stage": 0}}),
    "stage 3": (8, {"zero": {"stage": 3}}),
    "reduced in float32": (
        8,
        {"zero": {"stage": 1}, "precision": {"reduce_dtype": "float32"}},
    ),
    "sequence": (8, {"mesh": {"sequence": 2}, "zero": {"stage": 1}}),
    "tensor": (8, {"mesh": {"tensor": 2}, "zero": {"stage": 1}}),
    "pipeline": (8, PIPELINE | {"zero": {"stage": 1}}),
    "pipeline, weights apart": (
        8,
        PIPELINE
        | {
            "zero": {"stage": 3},
            "pipeline": "zb_h1",
        },
    ),
    "blocks on the host": (8, {"zero": {"stage": 1} | HOST}),
    "one program, state on the host": (
        8,
        {"zero": {"stage": 1, "offload": "pinned_host"}},
    ),
}


@pytest.fixture(autouse=True)
def _smaller_arrays_move(monkeypatch):
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 16)


def start(settings, num_devices=8, num_microbatches=1, tx=None, **changes):
    fixed = {"num_microbatches": num_microbatches}
    precision = {"compute_dtype": "bfloat16"} | settings.get("precision", {})
    zero = {"min_shard_elements": 0} | settings.get("zero", {})
    return zjax.initialize(
        totals.make_model(**changes),
        tx or optax.adamw(1e-2, weight_decay=0.5),  # decays every parameter
        None,
        totals.make_batch(0),
        fixed | settings | {"zero": zero, "precision": precision},
        devices=jax.devices()[:num_devices],
    )


def biases(run, state):
    """The biases of each segment, float32[blocks, experts]."""
    params = run.step.parameters(state)
    return [np.asarray(params[name]["router"]["bias"]) for name in totals.SEGMENTS]


def trained(settings, num_devices, num_microbatches, num_steps=3, **changes):
    """Loads of each step, and the biases after them."""
    run = start(settings, num_devices, num_microbatches, **changes)
    state, loads = run.state, []
    for step in range(num_steps):
        state, metrics = run.step(state, totals.make_batch(step))
        loads.append([np.asarray(metrics[f"load/{i}"]) for i in range(2)])
    return loads, biases(run, state)


@functools.cache
def by_hand(num_steps=3):
    params = totals.init(jax.random.key(0))  # its biases do not depend on the key
    found = [np.array(params[name]["router"]["bias"]) for name in totals.SEGMENTS]
    loads = []
    for step in range(num_steps):
        batch = totals.make_batch(step)
        loads.append([])
        for stack in found:
            load = [totals.load_by_hand(bias, batch) for bias in stack]
            loads[-1].append(np.array(load))
            stack[:] = [*map(totals.moved_by_hand, stack, load)]
    return loads, found


def assert_as_by_hand(loads, biases):
    """Exactly equal, also the floats."""
    expected_loads, expected = by_hand()
    for one, other in zip(loads, expected_loads, strict=True):
        for load, expected_load in zip(one, other, strict=True):
            assert load.dtype == np.int32
            np.testing.assert_array_equal(load, expected_load)
    for bias, expected_bias in zip(biases, expected, strict=True):
        np.testing.assert_array_equal(bias, expected_bias)


@pytest.mark.parametrize("path", [*PATHS][1:])
def test_every_path_counts_and_moves_as_by_hand(path):
    """Fails for counts of one device or microbatch, and a bias moved by each of them.

    Also if weight decay, the compute dtype or a rounded sum touch the bias.
    """
    num_devices, settings = PATHS[path]
    whole = {"takes_layers_apart": False, "init_layer": None}
    changes = whole if "one program" in path else {}
    assert_as_by_hand(*trained(settings, num_devices, 2, **changes))


@pytest.mark.parametrize(("num_devices", "num_microbatches"), [(1, 1), (8, 8)])
def test_accumulation_changes_no_bit(num_devices, num_microbatches):
    assert_as_by_hand(*trained({"zero": {"stage": 1}}, num_devices, num_microbatches))


@pytest.mark.parametrize("path", ["one device", "blocks on the host"])
def test_a_skipped_step_and_an_evaluation_move_nothing(path):
    """Fails if a step that is not finite moves the bias."""
    num_devices, settings = PATHS[path]
    run = start(settings, num_devices)
    broken = totals.make_batch(0)
    broken["x"][:] = np.nan
    before = biases(run, run.state)
    state, metrics = run.step(run.state, broken)
    assert metrics["skipped_steps"] == 1
    assert "load/0" not in run.evaluate(state, totals.make_batch(0))
    for bias, expected in zip(biases(run, state), before, strict=True):
        np.testing.assert_array_equal(bias, expected)


def test_a_delayed_update_moves_the_bias_one_step_late():
    """Fails if a delayed update reads the totals of the step it runs in."""
    offload = OFFLOAD | {"delay_updates_from": 2}
    run = start({"zero": {"stage": 1, "offload": offload}})
    bias, state = biases(run, run.state)[1][2], run.state
    for step in range(4):
        state, metrics = run.step(state, totals.make_batch(step))
    for step in (0, 1):  # step 2 runs before the update of step 1
        load = totals.load_by_hand(bias, totals.make_batch(step))
        bias = totals.moved_by_hand(bias, load)
    expected = totals.load_by_hand(bias, totals.make_batch(3))
    np.testing.assert_array_equal(metrics["load/1"][2], expected)


def test_evaluation_chooses_by_the_bias():
    run = start({"zero": {"stage": 1}})
    params = run.step.parameters(run.state)
    batch = jax.tree.map(jnp.asarray, totals.make_batch(0))
    loss = functools.partial(totals.make_model().loss, model_state={}, batch=batch)
    found = loss(params, key=None).value
    np.testing.assert_allclose(run.evaluate(run.state, batch)["loss"], found, 1e-2)
    params["many"]["router"]["bias"] = 2.0 * jnp.eye(3, 5)
    assert abs(loss(params, key=None).value - found) > 0.05 * found


def test_a_bias_is_saved_and_restored_on_another_mesh(tmp_path):
    run = start({"zero": {"stage": 3}})
    state, _ = run.step(run.state, totals.make_batch(0))
    zjax.save(tmp_path, state, run)
    other = start({"zero": {"stage": 1} | HOST}, 4)
    restored, _ = zjax.restore(tmp_path, other)
    for bias, expected in zip(biases(other, restored), biases(run, state), strict=True):
        np.testing.assert_array_equal(bias, expected)


def with_segments(**changes):
    stack = totals.make_model().stack
    first, second = stack.segments
    segments = dataclasses.replace(first, **changes), second
    return dataclasses.replace(stack, segments=segments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"totals": {"load": (4,), "seen": ()}},
            "totals/load='int32[3]' is not the int32[4] that the segment declares; let "
            "Auxiliary.totals of a block and Segment.totals agree\n"
            "totals/seen=None is not the int32[] that the segment declares; let "
            "Auxiliary.totals of a block and Segment.totals agree",
        ),
        (
            {"moves": {"bias": totals.move}},
            "Segment.moves='bias' is no parameter of a block of segment 0; use one of "
            "router/bias, w",
        ),
    ],
    ids=["totals", "moves"],
)
def test_what_a_segment_declares_is_checked(changes, message):
    stack = with_segments(**changes)
    with pytest.raises(ModelError, match=re.escape(message)):
        run = start({}, stack=stack, loss=zjax.loss_of(stack))
        run.step(run.state, totals.make_batch(0))


def test_totals_need_names_of_their_own():
    model = totals.make_model()
    params = totals.init(jax.random.key(0))
    batch = jax.tree.map(jnp.asarray, totals.make_batch(0))

    def head(params, x, batch):
        return *totals.head(params, x, batch)[:2], {"load/0": x.sum()}

    stack = dataclasses.replace(model.stack, head=head)
    with pytest.raises(ModelError, match="metrics/load/0='int32' is given twice"):
        zjax.loss_of(stack)(params, {}, batch, None)


def test_an_optimizer_that_averages_a_moved_parameter_is_refused():
    tx = optax.contrib.schedule_free_sgd(0.1)
    with pytest.raises(PlanError) as error:
        start({}, tx=tx)
    assert str(error.value) == (
        "tx='schedule_free' averages few/router/bias, which moves without a gradient; "
        "use another optimizer"
    )
