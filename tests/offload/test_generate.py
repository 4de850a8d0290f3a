"""Text from parameters that rest elsewhere and come up block by block."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import small_run
from tests.support.language import make_text
from tests.support.offload import (
    LLAMA,
    THREE,
    arrays_besides,
    make_batch,
    make_config,
    memories,
    start,
    train,
)
from zjax.errors import ConfigError
from zjax.generation.generate import generate
from zjax.offload import units
from zjax.run import fused
from zjax.settings import schema

NUM_NEW, PROMPT = 5, 4
MOE = schema.TokenChoice(num_experts=4, every=2, first_dense=1, top_k=2, num_shared=1)
FORMS = {
    "tiles": dataclasses.replace(THREE, mlp_tiles=2),
    "experts": dataclasses.replace(LLAMA, num_layers=3, moe=MOE),
}
SAMPLED = {"temperature": 1.5, "top_k": 20, "top_p": 0.95, "key": jax.random.key(3)}


def make_run(model=THREE, stage=2, memory="pinned_host", **zero):
    """A run whose blocks rest elsewhere, with weights of which every layer matters."""
    zero |= {"parameter_memory": memory}
    run = start(make_config(memory, stage, model=model, zero=zero))
    return run, run.state


def prompts(rows):
    return make_text(THREE, rows=rows, length=PROMPT)["tokens"]


def assert_same_text(run, state, tokens, **settings):
    """Fails if blocks that come up in turn write another text than all at once."""
    settings = {"max_new_tokens": NUM_NEW} | settings
    found = run.generate(state, tokens, **settings)
    expected = generate(run.bind(state), tokens, **settings)
    np.testing.assert_array_equal(found, expected)
    return np.asarray(found)


@pytest.mark.parametrize("form", FORMS)
def test_text_is_that_of_all_blocks_at_once(form):
    """Fails if a pass is not that of the whole program, or devices change the text."""
    run, state = make_run(FORMS[form], stage=3)
    whole = assert_same_text(run, state, prompts(8), **SAMPLED)
    assert len(set(whole[:, PROMPT:].ravel().tolist())) > 4
    found = run.generate(state, prompts(3), max_new_tokens=NUM_NEW, **SAMPLED)
    np.testing.assert_array_equal(found, whole[:3])


def test_prompts_of_different_lengths_and_rows_that_end():
    run, state = make_run(stage=3)
    settings = SAMPLED | {"lengths": jnp.array([4, 2, 3], jnp.int32)}
    free = assert_same_text(run, state, prompts(3), **settings)
    end_id = int(free[1, PROMPT + 1])
    ended = assert_same_text(run, state, prompts(3), end_ids=[end_id], **settings)
    assert (ended[1, PROMPT + 1 :] == end_id).all()
    assert not np.array_equal(free, ended)


def test_blocks_on_disks(tmp_path):
    run, state = make_run(memory="nvme", nvme_paths=(str(tmp_path),))
    assert_same_text(run, state, prompts(3), **SAMPLED)


def watch(monkeypatch, program, name, note):
    """Calls `note(*args)` before each call of one of the programs."""
    real = getattr(program, name)

    def watched(*args):
        note(*args)
        return real(*args)

    monkeypatch.setattr(program, name, watched)


def test_passes_end_soon_after_the_last_end(monkeypatch):
    """Fails if rows that have ended go on, or what came up for them stays.

    Two passes are on the way when an end is read.
    """
    run, state = make_run()
    free = np.asarray(run.generate(state, prompts(1), max_new_tokens=NUM_NEW))
    program, passes = run.step.executor.generation, []
    watch(monkeypatch, program, "embed", lambda *_: passes.append(1))
    settings = {"max_new_tokens": 12, "end_ids": [int(free[0, PROMPT])]}
    found = np.asarray(run.generate(state, prompts(1), **settings))
    assert (found[0, PROMPT:] == free[0, PROMPT]).all()
    assert len(passes) < 12
    assert (program.units.stream.arrived, len(program.units.stream.waiting)) == ({}, 0)


def test_trainers_write_the_same_text_block_by_block(tmp_path, monkeypatch):
    """Fails if a trainer brings up all blocks at once, or its text is another."""
    texts = []
    for name, settings in (("whole", ()), ("blocks", BY_BLOCK)):
        if settings:
            monkeypatch.delattr(fused.Weights, "__call__")
        trainer = small_run.make_trainer(tmp_path / name, *TEXT, *settings)
        texts.append(trainer.generate("def ", max_new_tokens=8))
        trainer.close()
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 5


TEXT = ("data.source=standard_library", "model.vocab_size=257", "model.num_layers=3")
BY_BLOCK = (
    "model.remat=full",
    "zero.offload=pinned_host",
    "zero.offload.parameter_memory=pinned_host",
)


def deep(num_layers):
    # No other array has the shape of this matrix.
    return dataclasses.replace(THREE, num_layers=num_layers, mlp_size=47)


def test_a_few_blocks_are_on_the_devices_whatever_the_depth(monkeypatch):
    """Fails if all blocks come up at once, stay after their use, or do not come up
    ahead of it."""
    monkeypatch.setattr(units, "AHEAD_BYTES", 0)
    run, state = make_run(deep(8))
    program = run.step.executor.generation
    stream, found = program.units.stream, []
    before = jax.live_arrays()

    def note(*_):
        blocks = [x for x in arrays_besides(before) if x.shape == (16, 47)]
        assert {x.sharding.memory_kind for x in blocks} == {"device"}
        found.append((len(blocks), stream.in_flight))

    watch(monkeypatch, program, "read", note)
    run.generate(state, prompts(2), max_new_tokens=3)
    assert len(found) == 3 * 8
    assert max(num for num, _ in found) == 3
    assert max(size for _, size in found) == stream.limit


def test_blocks_of_the_next_token_come_up_while_one_is_chosen(monkeypatch):
    run, state = make_run()
    program, here = run.step.executor.generation, []
    arrived = program.units.stream.arrived
    watch(
        monkeypatch,
        program,
        "choose",
        lambda *_: here.append(sorted(program.units.stream.arrived)),
    )
    run.generate(state, prompts(1), max_new_tokens=2)
    assert here == [[(number, unit) for unit in range(3)] for number in (1, 2)]
    assert not arrived


def test_each_program_is_compiled_once(caplog):
    """Fails if a block, a token or a call compiles again."""
    run, state = make_run(deep(4), stage=3)

    def compiled():
        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            run.generate(state, prompts(3), max_new_tokens=4, **SAMPLED)
        texts = (record.getMessage() for record in caplog.records)
        texts = (x.split()[1] for x in texts if x.startswith("Compiling"))
        kinds = ("_embed", "_read", "_choose")
        return sorted(x[4:-1] for x in texts if x[4:-1] in kinds)

    # A pass with prompts, and a pass of single tokens.
    kinds = ["_choose", "_embed", "_read"]
    assert compiled() == sorted(kinds + kinds)
    assert compiled() == []


def test_generating_leaves_the_state_as_it_is():
    """Fails if parameters stay on the devices, or training cannot go on."""
    losses = []
    config = make_config("pinned_host", zero={"parameter_memory": "pinned_host"})
    for generates in (False, True):
        run = start(config)
        state, _ = train(run, 2)
        if generates:
            run.generate(state, prompts(2), max_new_tokens=3)
            assert memories(state.params["blocks"]) == {"pinned_host"}
        _, metrics = run.step(state, make_batch(2))
        losses.append(float(metrics["loss"]))
    assert losses[0] == losses[1]


def test_settings_out_of_range_are_refused():
    run, state = make_run()
    with pytest.raises(ConfigError) as error:
        run.generate(state, prompts(1), max_new_tokens=0, temperature=1.0)
    assert str(error.value) == (
        "max_new_tokens=0 is below 1; ask for 1 or more\n"
        "key=None is missing and temperature=1.0 draws tokens; pass jax.random.key(0)"
    )
