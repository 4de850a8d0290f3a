"""A step as one program, and what it says of itself."""

import dataclasses

import jax
import optax
import pytest

from tests.support import models, offload, runs
from zjax.errors import PlanError
from zjax.settings import schema
from zjax.sharding import plan as plans


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
    with pytest.raises(PlanError) as caught:
        run.step.compile(offload.make_batch(0))
    assert str(caught.value) == (
        "program='train' is a sequence of programs where the state is offloaded; set "
        "zero.offload=None to compile it as one"
    )


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
