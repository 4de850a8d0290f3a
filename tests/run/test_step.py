"""A step as one program: what it says of itself, and what it refuses."""

import dataclasses
import re

import jax
import numpy as np
import optax
import pytest

from tests.support import models, offload, rules, runs
from tests.support.refusals import non_finite_error, plan_error, state_error
from zjax.errors import NonFiniteError, StateError
from zjax.optim.build import make_optimizer
from zjax.replicas.state import saved_state
from zjax.settings import schema
from zjax.sharding import plan as plans

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
    shown, _ = start_plain()
    assert repr(shown.state).startswith("TrainState(step=Array(0, dtype=int32), num_")
    jax.eval_shape(lambda state: assert_traced(repr(state)), shown.state)
    # Another run: JAX 0.11 keeps an array on a CPU that has been printed.
    run, batch = start_plain()
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


@pytest.fixture(autouse=True)
def _small_arrays_move(monkeypatch):
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 64)


def start(stage=3):
    return runs.make_small_run(optax.adam(0.1), stage=stage)


def test_the_peak_is_what_the_compiler_allocates():
    """Fails if the donated state counts twice, or the temporaries not at all."""
    run, batch = start(), models.make_batch()
    analysis = run.step.compile(batch).memory_analysis()
    arguments, temporaries = (
        analysis.argument_size_in_bytes,
        analysis.temp_size_in_bytes,
    )
    not_donated = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    peak = run.step.predict_peak(batch)
    assert peak.total == arguments + not_donated + temporaries
    assert peak.parts["results"] < peak.parts["state"] < arguments
    assert peak.moment == "train"


def test_a_program_is_compiled_once_for_each_batch():
    run, batch = start(), models.make_batch()
    assert run.step.compile(batch) is run.step.compile(batch)
    assert run.step.compile(batch, "evaluate") is not run.step.compile(batch)


@pytest.mark.parametrize("where", ["device", "pinned_host"])
def test_weights_are_bound_without_compiling_again(where):
    """Fails if each `bind` makes programs of its own."""
    run = offload.start(offload.make_config(where))
    state, _ = run.step(run.state, offload.make_batch(0))
    run.bind(state)
    compiled = []

    def listen(name, seconds, **_):
        compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run.bind(state)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not [name for name in compiled if "compile" in name]


def test_a_sequence_of_programs_is_not_compiled_as_one():
    run = offload.start(offload.make_config("pinned_host"))
    with plan_error(
        "program='train' is a sequence of programs where the state is offloaded; set "
        "zero.offload=None to compile it as one"
    ):
        run.step.compile(offload.make_batch(0))


@pytest.mark.usefixtures("greedy")
@pytest.mark.parametrize("where", ["device", "pinned_host"])
def test_every_device_and_process_has_all_text(where):
    """Fails if text is generated under the mesh of the run, which shards it."""
    config = offload.make_config(where, model=offload.GPT)
    mesh = schema.Mesh(data=4, tensor=2)
    run = offload.start(dataclasses.replace(config, mesh=mesh))
    prompts = offload.make_batch(0)["tokens"][:, :3]
    text = run.generate(run.state, prompts, max_new_tokens=2)
    assert text.shape == (len(prompts), 5)
    assert text.sharding.is_fully_replicated


FREEZE = 2


def make_run(name, freeze_step=FREEZE, communication=None, **changes):
    changes |= {"freeze_step": freeze_step, "num_warmup_steps": 1}
    optimizer = rules.optimizer(name, **changes)
    settings = {
        "communication": communication or schema.Communication(),
        "optimizer": optimizer,
        "mesh": schema.Mesh(replica=2),
        "num_steps": 8,
    }
    tx = make_optimizer(runs.make_config(0, **settings))
    return runs.make_small_run(tx, 0, num_devices=2, **settings)


def after_warm_up(run, num_skipped):
    """The state after the warm-up, of which the first steps have no finite loss."""
    state = run.state
    for step in range(FREEZE):
        batch = models.make_batch(step)
        if step < num_skipped:
            batch["x"][0] = np.nan
        state, _ = run.step(state, batch)
    assert int(state.num_skipped) == num_skipped
    return state


@pytest.mark.parametrize("name", ["onebit_adam", "onebit_lamb", "zero_one_adam"])
def test_a_warm_up_of_skipped_steps_ends_the_run(name):
    """Without second moments no parameter would move again."""
    run = make_run(name)
    state = after_warm_up(run, FREEZE)
    with non_finite_error(
        "optimizer.rule.freeze_step=2 ends a warm-up whose updates of second moments "
        "were all skipped, and nothing would move; use more, or a smaller "
        "precision.loss_scale.initial"
    ):
        run.step(state, models.make_batch())


def test_steps_without_second_moments_are_no_warm_up():
    """Fails if a step in one bit counts as one that updates second moments."""
    changes = {"var_update_scaler": 1}
    run = make_run("zero_one_adam", FREEZE + 1, **changes)
    state = after_warm_up(run, FREEZE)
    state, metrics = run.step(state, models.make_batch(FREEZE))
    assert metrics["skipped_steps"] == FREEZE
    for later in (run, make_run("zero_one_adam", FREEZE, **changes)):
        with pytest.raises(NonFiniteError, match="updates of second moments were all"):
            later.step(state, models.make_batch())


def test_one_step_of_the_warm_up_is_enough():
    run = make_run("onebit_adam")
    state = after_warm_up(run, FREEZE - 1)
    _, metrics = run.step(state, models.make_batch())
    assert metrics["skipped_steps"] == FREEZE - 1


def test_rounds_do_not_begin_later_than_they_began():
    """Replicas share parameters after an exchange, but not the moments of Adam."""
    rounds = schema.LocalSteps(num_steps=2, num_synchronous_steps=2)
    run = make_run("adam", 0, communication=schema.Communication(local_steps=rounds))
    _, state = runs.train(run, 4)
    rounds = dataclasses.replace(rounds, num_synchronous_steps=6)
    communication = schema.Communication(local_steps=rounds)
    later = make_run("adam", 0, communication=communication)
    with state_error(
        "communication.local_steps.num_synchronous_steps=6 joins replicas at step 5 "
        "that have stepped apart; use 4 or less, or a state whose replicas are equal"
    ):
        later.step(state, models.make_batch(4))
    _, state = runs.train(make_run("adam", 0, communication=communication), 2)
    runs.train(later, 2, first=2, state=state)


def test_replicas_that_stepped_apart_do_not_step_together():
    """Fails if a later freeze lets them differ to the end of the run."""
    scaler = {"local_step_scaler": 1, "local_step_clipper": 2}
    run = make_run("zero_one_adam", **scaler)
    _, state = runs.train(run, 5)
    later = make_run("zero_one_adam", 7, **scaler)
    with state_error(
        "optimizer.rule.freeze_step=7 joins replicas at step 6 that have stepped "
        "apart; use 5 or less, or a state whose replicas are equal"
    ):
        later.step(state, models.make_batch(5))
    _, state = runs.train(run, 1, first=5, state=state)
    _, state = runs.train(later, 1, first=6, state=state)
    for x in (state.master, state.extra.replicas.master):
        first, last = (np.asarray(s.data) for s in x["up"].addressable_shards)
        np.testing.assert_array_equal(first, last)
