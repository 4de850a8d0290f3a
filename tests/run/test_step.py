"""What a step refuses to be called with."""

import re

import jax
import optax
import pytest

from tests.support import models, offload, runs
from zjax.errors import StateError
from zjax.sharding import plan as plans
from zjax.train.state import saved_state

CONSUMED = re.escape(
    "state='consumed' was passed to a step, which used its memory for the next state; "
    "pass what the step returned, `state, metrics = run.step(state, batch)`, or make "
    "the run anew"
)


USES = {
    "step": lambda run, batch: run.step(run.state, batch),
    "evaluate": lambda run, batch: run.evaluate(run.state, batch),
    "settle": lambda run, batch: run.step.settle(run.state),
    "bind": lambda run, batch: run.bind(run.state),
    "save": lambda run, batch: saved_state(run.state, run.plan),
}


def assert_refused(run, batch):
    for use in USES.values():
        with pytest.raises(StateError, match=CONSUMED):
            use(run, batch)


def start_plain():
    return runs.make_small_run(optax.sgd(0.1), stage=3), models.make_batch()


def test_a_consumed_state_is_refused_by_name():
    """Fails if XLA gets its arrays: on several devices that ends Python."""
    run, batch = start_plain()
    state, first = run.step(run.state, batch)
    assert_refused(run, batch)
    _, second = run.step(state, batch)
    assert float(second["loss"]) < float(first["loss"])


def test_a_consumed_state_is_printed_as_such():
    """Fails if a notebook that shows a run ends with an error of a deleted array."""
    run, batch = start_plain()
    assert repr(run.state).startswith("TrainState(step=Array(0, dtype=int32), num_")
    jax.eval_shape(lambda state: assert_traced(repr(state)), run.state)
    run.step(run.state, batch)
    said = "TrainState(consumed by a step; the step returned the next state)"
    assert repr(run.state) == said
    assert f"state={said}" in repr(run)


def assert_traced(text):
    assert text.startswith("TrainState(step=JitTracer")


def test_a_consumed_state_on_disks_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 64)
    zero = {"nvme_paths": (str(tmp_path),), "parameter_memory": "nvme"}
    run = offload.start(offload.make_config("nvme", zero=zero))
    run.step(run.state, offload.make_batch(0))
    assert_refused(run, offload.make_batch(0))


def test_a_state_that_was_consumed_in_part_is_refused():
    """Fails if an array is passed on that a step took before it failed."""
    run, batch = start_plain()
    jax.tree.leaves(run.state.master)[-1].delete()
    assert_refused(run, batch)
