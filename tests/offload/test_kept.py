"""What blocks keep for the backward pass, where they run one by one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zjax
from tests.support import lines
from tests.support.offload import (
    GPT,
    LLAMA,
    ROWS,
    make_batch,
    make_config,
    start,
)
from zjax.config.check import check_config
from zjax.errors import ConfigError, PlanError
from zjax.offload.shapes import PassShapes
from zjax.settings import schema
from zjax.sharding import plan as plans
from zjax.typing import Auxiliary, StepBatch

DEVICES = 8
STREAM, HEADS, MLP, NORM = (2, 8, 16), (2, 8, 4, 4), (2, 8, 24), 2 * [(2, 8, 1)]
SCORES = (2, 4, 8, 1, 8)
"""Parts that one of the devices has of a small model's activations."""


def run_of(remat, **changes):
    model = dataclasses.replace(changes.pop("model", GPT), remat=remat)
    return start(make_config("pinned_host", model=model, **changes))


def passes_of(run):
    return run.step.executor.step.backward


def shapes_of(passes):
    return PassShapes(passes.programs, passes.units, passes.saved_rows, make_batch(0))


def rows_kept(run):
    """One device's part of what a block leaves, as the peak of a step counts it."""
    with jax.set_mesh(run.mesh):
        rows = shapes_of(passes_of(run)).saved
    return rows[: len(rows) // GPT.num_layers]


def flops_back(run, monkeypatch):
    """Of the backward program of a block, on one device."""
    passes, found = passes_of(run), []
    back = passes.programs.block_backward

    def noted(*args):
        found.append(back.lower(*args).compile().cost_analysis()["flops"])
        return back(*args)

    monkeypatch.setattr(passes.programs, "block_backward", noted)
    run.step(run.state, make_batch(0))
    return found[0]


@pytest.mark.slow
def test_what_is_kept_is_not_computed_again(monkeypatch):
    """Fails if a policy only costs memory: of three products two are left."""
    wide = dataclasses.replace(GPT, embed_size=64, mlp_size=256)
    full, *others = (
        flops_back(run_of(remat, stage=1, model=wide), monkeypatch)
        for remat in ("full", "attention", "attention_and_mlp", "elementwise", "none")
    )
    assert sorted([full, *others], reverse=True) == [full, *others]
    assert others[-1] < 0.77 * full  # products alone would give 2/3


@pytest.mark.parametrize(
    ("remat", "shapes"),
    [
        ("attention", [STREAM, HEADS]),
        ("attention_and_mlp", [STREAM, HEADS, MLP]),
        ("elementwise", [STREAM, *NORM, *4 * [HEADS], STREAM, *NORM, MLP]),
        ("dots", [*5 * [STREAM], MLP]),
        ("none", [STREAM, *NORM, *4 * [HEADS], SCORES, STREAM, *NORM, MLP]),
    ],
)
def test_blocks_keep_what_the_policy_names(remat, shapes):
    """Fails if parameters are kept with it, or anything twice."""
    rows = rows_kept(run_of(remat, stage=1))
    assert sorted(row.shape for row in rows) == sorted(shapes)


def test_what_blocks_keep_is_counted():
    run = run_of("elementwise", stage=1)
    rows = rows_kept(run)
    run.step(run.state, make_batch(0))
    each = sum(row.device_bytes for row in rows)
    assert passes_of(run).residual_bytes == GPT.num_layers * each


def test_norms_without_a_mean_keep_one_number_of_a_row():
    """Fails if zeros are kept in its place, whole on every device."""
    shapes = [row.shape for row in rows_kept(run_of("elementwise", model=LLAMA))]
    assert shapes.count(NORM[0]) == 2
    assert {shape[0] for shape in shapes} == {ROWS // DEVICES}


def test_tables_of_sparse_attention_are_not_kept():
    """Fails if constants, such as which blocks are live, are kept for every block."""
    sparse = dataclasses.replace(GPT, attention=schema.Sparse(block=16))
    rows = rows_kept(run_of("attention", stage=1, model=sparse))
    assert {row.dtype for row in rows} == {np.dtype("float32")}


def test_more_than_inputs_of_blocks_stays_on_the_devices():
    changes = {"remat": "attention", "activation_memory": "pinned_host"}
    model = dataclasses.replace(GPT, **changes)
    with pytest.raises(ConfigError) as error:
        check_config(make_config("pinned_host", model=model), DEVICES)
    assert str(error.value) == (
        "model.remat='attention' saves more than block inputs, and "
        "model.activation_memory='pinned_host' stores those alone; use full, or "
        "device there"
    )


@pytest.fixture(autouse=True)
def _smaller_arrays_move(monkeypatch):
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 16)


def own_run(block=lines.block, activation_memory="device", **changes):
    """A line of a user's blocks, whose model says what they keep."""
    policies = jax.checkpoint_policies
    model = lines.make_model(block, 3)
    own = {"keeps": policies.dots_saveable, "loss": zjax.loss_of(model.stack)}
    own |= {"takes_layers_apart": True}
    model = dataclasses.replace(model, **(own | changes))
    zero = {"stage": 2, "min_shard_elements": 0, "offload": "pinned_host"}
    sections = {
        "model": {"activation_memory": activation_memory},
        "precision": {"compute_dtype": "float32"},
        "zero": zero,
    }
    return zjax.initialize(model, None, None, lines.make_batch(), sections)


def kept_by(run):
    """What a step finds at rest of each of a user's blocks."""
    passes, found = passes_of(run), []
    save = passes.save
    passes.save = lambda *parts: (found.append(save(*parts)), found[-1])[1]
    _, metrics = run.step(run.state, lines.make_batch())
    arrays = [x for load, _ in found for x in load.arrays]
    return [x.sharding.memory_kind for x in arrays], float(metrics["grad_norm"])


def test_blocks_of_ones_own_keep_what_their_model_names():
    """Fails if its policy counts where the inputs of blocks are to go elsewhere."""
    here, elsewhere = own_run(), own_run(activation_memory="pinned_host")
    places, norm = kept_by(here)
    assert places == 2 * 3 * ["device"]  # the stream, and a product
    places, other = kept_by(elsewhere)
    assert places == 3 * ["pinned_host"]
    assert norm == pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize("keeps", [None, jax.checkpoint_policies.dots_saveable])
def test_what_blocks_add_to_the_loss_counts(keeps):
    """Fails if auxiliary losses, or their gradients, are lost between programs."""
    run = own_run(lines.penalised, keeps=keeps)
    _, metrics = run.step(run.state, lines.make_batch())
    model = lines.make_model(lines.penalised, 3)
    (wanted, *_) = lines.train(
        model, lines.make_batch(), jax.devices()[:1], num_microbatches=1
    )
    found = float(metrics["loss"]), float(metrics["grad_norm"])
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_a_policy_that_sends_away_is_refused():
    def block(params, x, context, key):
        y = jax.ad_checkpoint.checkpoint_name(jnp.tanh(x @ params["w"]), "y")
        return x + jnp.sin(y), Auxiliary()

    keeps = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["y"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    run = own_run(block, keeps=keeps)
    with pytest.raises(PlanError) as error:
        run.step(run.state, lines.make_batch())
    assert str(error.value) == (
        "keeps='pinned_host' offloads residuals of blocks; save them, or set "
        "model.activation_memory to offload inputs alone"
    )


def test_a_stream_that_changes_its_type_is_refused():
    def block(params, x, context, key):
        x, auxiliary = lines.block(params, x, context, key)
        return x.astype(jnp.bfloat16), auxiliary

    run = own_run(block)
    with pytest.raises(PlanError) as error:
        run.step(run.state, lines.make_batch())
    assert str(error.value) == (
        "stream='bfloat16[16, 8]' enters a block as float32[16, 8]; have embedding and "
        "blocks agree, or leave Model.keeps out"
    )


def test_a_pass_that_failed_keeps_nothing_while_the_next_runs(monkeypatch):
    run, other = (run_of("elementwise", stage=1) for _ in range(2))
    passes, left = passes_of(run), []

    def fail(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(passes.programs, "block_backward", fail)
        with pytest.raises(KeyboardInterrupt):
            run.step(run.state, make_batch(0))
    assert passes.saved.arrived
    embed = passes.programs.embed
    monkeypatch.setattr(
        passes.programs,
        "embed",
        lambda *args: left.append(passes.saved.arrived) or embed(*args),
    )
    run.step(other.state, make_batch(0))
    assert left == [{}]


def test_gradients_of_the_head_come_before_blocks_give_anything_up():
    """Fails if they are said to wait where nothing is free yet."""
    model = dataclasses.replace(LLAMA, vocab_size=200)
    run = run_of("elementwise", stage=1, model=model)
    train, passes = run.step.executor.step, passes_of(run)
    with jax.set_mesh(run.mesh):
        shapes = shapes_of(passes)
        step = StepBatch(make_batch(0))
        moments = passes.moments(train.state_rows, step, train.waiting_bytes)
    (backward,) = (each for each in moments if each.moment == "backward")
    inputs = sum(row.device_bytes for row in shapes.saved)
    of_head = (200 + 1) * LLAMA.embed_size * 4 // DEVICES  # with the norm before it
    assert inputs + of_head > train.waiting_bytes(inputs)
    back = backward.parts["residuals, then gradients"]
    assert back == inputs + of_head + shapes.carry
