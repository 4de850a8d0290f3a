"""A run from its first step to its last, and what interrupts it."""

import dataclasses
import json
import math
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import optax
import pytest

import zjax
from tests.support import models, programs, small_run
from tests.support.refusals import config_error, data_error, non_finite_error
from zjax.checkpoint.export import export_safetensors
from zjax.errors import CheckpointError, DataError, NonFiniteError

ROOT = pathlib.Path(__file__).parents[2]


def start_program(directory, num_steps, *overrides):
    command = [sys.executable, "-m", "tests.support.small_run", str(directory)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return programs.started([*command, num_steps, *overrides], cwd=ROOT, **pipes)


def wait_for_step(directory, step, program):
    """Waits until a run has told of a step."""
    path = pathlib.Path(directory) / "metrics.jsonl"
    programs.wait_until(
        lambda: path.exists() and f'"step": {step},' in path.read_text(), program
    )


def assert_same_run(trainer, other):
    """Bit for bit the same state."""
    states = (jax.tree.map(np.asarray, each.state) for each in (trainer, other))
    jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Eight steps without interruption."""
    return small_run.fit(tmp_path_factory.mktemp("whole"))


def test_run_leaves_numbers_checkpoint_and_picture(tmp_path):
    told = []
    trainer = small_run.fit(
        tmp_path,
        small_run.EVALUATED,
        "evaluation.every_steps=4",
        "observe.plot=True",
        "checkpoint.keep_best=1",
        callbacks=[lambda step, values: told.append((step, dict(values)))],
    )
    assert [step for step, values in told if "loss" in values] == list(range(1, 9))
    assert [step for step, values in told if "eval_loss" in values] == [4, 8]
    assert told[0][1]["consumed_tokens"] == 16 * 16
    assert (tmp_path / "training.png").stat().st_size > 10_000
    assert trainer.store.steps() == (8,)
    assert trainer.store.best() == 8
    extra = trainer.store.extra()
    assert extra["config"]["zero"]["stage"] == 2
    assert extra["data"]["step"] == 8
    assert extra["plan"].startswith("plan: ZeRO 2 on mesh (data=8)")


def test_loss_falls_on_text_that_can_be_learnt(tmp_path):
    settings = "num_steps=60", "model.dropout_rate=0", small_run.EVALUATED
    trainer = small_run.fit(tmp_path, *settings)
    losses = small_run.losses(tmp_path)
    assert losses[60] < losses[1] - 0.5
    assert trainer.evaluate()["eval_loss"] < losses[1] - 0.5


def test_resumed_run_is_bit_for_bit_the_uninterrupted_one(tmp_path, whole):
    """Fails if resuming forgets the data position, the key, the schedule or moments."""
    small_run.fit(tmp_path, "num_steps=3", "optimizer.schedule=constant")
    constant = small_run.fit(tmp_path / "straight", "optimizer.schedule=constant")
    resumed = small_run.fit(tmp_path, "optimizer.schedule=constant")
    assert_same_run(resumed, constant)
    straight = small_run.losses(tmp_path / "straight")
    assert small_run.losses(tmp_path) == straight
    assert straight != small_run.losses(whole.config.directory)


def test_run_killed_three_times_ends_bit_for_bit_the_same(tmp_path, whole):
    """Kills a run that saves every second step at random moments, then lets it end."""
    moments = random.Random(0)
    for _ in range(3):
        with start_program(tmp_path, 8, "checkpoint.every_steps=2") as program:
            try:
                wait_for_step(tmp_path, moments.randint(2, 6), program)
            except AssertionError:
                break  # it was resumed behind that step and came to its end
            time.sleep(moments.random() * 0.2)
    resumed = small_run.fit(tmp_path, "checkpoint.every_steps=2")
    assert_same_run(resumed, whole)
    assert small_run.losses(tmp_path) == small_run.losses(whole.config.directory)


def test_other_devices_meshes_and_stages_continue_the_same_curve(tmp_path, whole):
    """8 devices, ZeRO 2; then 4, ZeRO 1; then 2, ZeRO 3, each from the last's state."""
    for steps, devices, stage in ((3, 8, 2), (6, 4, 1), (8, 2, 3)):
        trainer = small_run.make_trainer(
            tmp_path, f"zero.stage={stage}", num_devices=devices
        )
        stop_after(trainer, steps)
        trainer.fit()
        assert trainer.store.latest() == steps
        trainer.close()
    expected = small_run.losses(whole.config.directory)
    continued = small_run.losses(tmp_path)
    assert continued == pytest.approx(expected, rel=1e-5)


def stop_after(trainer, num_steps):
    """Ends a run early by the signal that a scheduler would send."""
    take = trainer.run.step

    def step(state, batch):
        result = take(state, batch)
        if int(result[0].step) == num_steps < trainer.config.num_steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    object.__setattr__(trainer, "run", Stepping(trainer.run, step))


class Stepping:
    """A run with another step."""

    def __init__(self, run, step):
        self._run, self.step = run, step

    def __getattr__(self, name):
        return getattr(self._run, name)


def broken_batches(first_bad):
    for step in range(1, 100):
        batch = models.make_batch(step)
        if step >= first_bad:
            batch["x"][0] = np.nan
        yield batch


def own_trainer(directory, batches, *overrides, tx=None, schedule=None):
    settings = {
        "global_batch_size": models.BATCH,
        "num_steps": 6,
        "directory": str(directory),
        "precision": {"compute_dtype": "float32"},
        "observe": {"sinks": ("jsonl",), "log_every_steps": 2},
        "checkpoint": {"every_steps": 2},
    }
    return zjax.Trainer(
        zjax.load_config(settings, *overrides),
        model=models.make_mlp(),
        tx=tx or optax.sgd(0.1),
        schedule=schedule,
        batches=batches,
    )


def test_run_that_is_to_stop_at_nan_says_at_which_step(tmp_path):
    trainer = own_trainer(
        tmp_path, list(broken_batches(4)), "precision.on_nonfinite=stop"
    )
    with pytest.raises(NonFiniteError) as error:
        trainer.fit()
    assert str(error.value).splitlines()[0] == (
        "loss=nan is not finite at step 4, whose update was not applied; lower "
        "optimizer.peak_learning_rate or look at the data"
    )
    trainer.close()
    assert trainer.store.latest() == 2


def test_strict_promotion_binds_the_loss_and_not_the_optimizer(tmp_path):
    with jax.numpy_dtype_promotion("strict"):
        batches, tx = list(broken_batches(99)), optax.adam(0.1)
        trainer = own_trainer(tmp_path, batches, "num_steps=1", tx=tx)
        trainer.fit()
    trainer.close()
    assert trainer.store.latest() == 1


@pytest.mark.parametrize(
    ("overrides", "limit"), [((), math.inf), (("optimizer.clip_norm=1.0",), 1.0)]
)
def test_clipping_that_is_set_holds_for_an_optimizer_that_is_given(
    overrides, limit, tmp_path
):
    trainer = own_trainer(tmp_path, list(broken_batches(99)), *overrides)
    trainer.close()
    assert trainer.run.config.optimizer.clip_norm == limit


def test_run_that_skips_for_ever_ends_with_its_cause_and_its_checkpoint(tmp_path):
    trainer = own_trainer(tmp_path, list(broken_batches(6)), "num_steps=60")
    with non_finite_error(
        "precision.on_nonfinite='skip' skipped 20 steps in a row, starting with "
        "loss=nan at step 6; lower optimizer.peak_learning_rate or look at the data; "
        "earlier checkpoints are unaffected\n"
        "batch='x' of 3 arrays are not finite at step 25; check the data of that step, "
        "unless they are intended\n"
        "gradients='bias, down, up' of 3 arrays are not finite at step 25; look for "
        "overflow or division by 0 in the model and its loss"
    ):
        trainer.fit()
    trainer.close()
    assert trainer.store.steps() == (2, 4)


def test_run_of_skipped_steps_alone_is_not_done(tmp_path):
    trainer = own_trainer(tmp_path, list(broken_batches(1)))
    with pytest.raises(NonFiniteError, match="skipped all 6 steps, starting with"):
        trainer.fit()
    trainer.close()
    assert trainer.store.steps() == ()


def test_error_right_after_a_save_costs_no_checkpoint(tmp_path):
    """Fails if a checkpoint that is being written is dropped when the run ends."""
    trainer = own_trainer(
        tmp_path, list(broken_batches(3)), "precision.on_nonfinite=stop"
    )
    with pytest.raises(NonFiniteError):
        trainer.fit()
    assert trainer.store.steps() == (2,)
    trainer.close()


def test_checkpoint_has_only_the_loss_of_its_own_weights(tmp_path):
    trainer = small_run.fit(
        tmp_path,
        small_run.EVALUATED,
        "evaluation.every_steps=3",
        "checkpoint.every_steps=4",
        "checkpoint.keep_last=3",
    )
    assert trainer.store.steps() == (4, 8)
    assert trainer.store.best() == 8  # step 4 was not evaluated; the last step was


def test_validation_data_is_looked_at_before_training(tmp_path):
    settings = (
        *("data.source=standard_library", "model.vocab_size=257"),
        "model.positions=rotary",  # no table of a million
        small_run.EVALUATED,
    )
    with pytest.raises(DataError, match="but the validation split of"):
        small_run.make_trainer(
            tmp_path, *settings, "data.length=1000000", "model.max_length=1000000"
        )


@pytest.mark.parametrize(
    ("prompt", "positions", "most", "problem"),
    [
        ("", (), 15, "has no token; give one token or more"),
        (
            "x" * 16,
            (),
            15,
            "has 16 tokens, and prompt and text together have at most 16; shorten it",
        ),
        (
            "x" * 32,
            ("model.positions=rotary", "model.positions.max_positions=32"),
            31,
            "has 32 tokens, and prompt and text together have at most 32; shorten it",
        ),
    ],
    ids=["empty", "row", "positions"],
)
def test_prompt_that_leaves_nothing_to_do_is_refused(
    tmp_path, prompt, positions, most, problem
):
    settings = ("num_steps=2", "data.source=standard_library", "model.vocab_size=257")
    trainer = small_run.make_trainer(tmp_path, *settings, *positions)
    with config_error(f"prompt={prompt[:20]!r} {problem}"):
        trainer.generate(prompt)
    assert [len(ids) for ids in trainer.encode_prompts([most * "x"])] == [most]


def test_run_that_is_to_skip_nan_keeps_its_weights(tmp_path):
    """The schedule of the caller's optimizer is logged, by applied steps."""
    rate = optax.linear_schedule(0.5, 0.0, 4)
    trainer = own_trainer(tmp_path, list(broken_batches(4)), schedule=rate)
    state = trainer.fit()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    rates = {x["step"]: x.get("learning_rate") for x in map(json.loads, lines)}
    assert (rates[2], rates[6]) == (0.375, 0.125)
    trainer.close()
    assert (int(state.step), int(state.num_skipped)) == (6, 3)
    assert np.isfinite(np.asarray(state.master["up"])).all()


def test_a_built_in_model_with_another_head_trains_on_the_configured_data(tmp_path):
    config = small_run.make_config(tmp_path, "num_steps=2")
    model = zjax.make_model(config)

    def head(params, carry, batch):
        loss, weight, metrics = model.stack.head(params, carry, batch)
        return loss, weight, metrics | {"twice": 2 * loss}

    trainer = zjax.Trainer(config, model=zjax.with_stack(model, head=head))
    trainer.fit()
    trainer.close()
    metrics = small_run.records(tmp_path)[0]
    assert metrics["twice"] == pytest.approx(2 * metrics["loss"], rel=1e-6)
    other = dataclasses.replace(config.model, num_layers=2)
    with config_error(
        "batches=None leave the model no data; give the batches that its loss reads"
    ):
        zjax.Trainer(dataclasses.replace(config, model=other), model=model)


def test_functions_that_a_trainer_would_not_read_are_refused(tmp_path):
    def loss_fn(model, batch, key):
        return 0.0

    with config_error(
        "loss_fn='loss_fn' is read as a part of the model; give "
        "model=zjax.adapt(model, loss_fn, batch)\n"
        "schedule='given' is the learning rate of tx, which is not given; give tx, or "
        "leave it out and set optimizer.schedule"
    ):
        zjax.Trainer({"directory": str(tmp_path)}, loss_fn=loss_fn, schedule=float)


def test_float16_that_overflows_at_the_least_scale_ends_the_run(tmp_path):
    trainer = own_trainer(
        tmp_path,
        list(broken_batches(1)),
        "precision.compute_dtype=float16",
        "precision.loss_scale.initial=1",
    )
    with pytest.raises(NonFiniteError, match="is the minimum and step 2 still"):
        trainer.fit()
    trainer.close()


def test_data_that_ends_early_is_an_error_and_costs_nothing(tmp_path):
    trainer = own_trainer(tmp_path, list(broken_batches(100))[:3])
    with data_error(
        "batches='given' end after step 3 of num_steps=6; give more, or set "
        "num_steps=3; the run is saved"
    ):
        trainer.fit()
    trainer.close()
    assert trainer.store.latest() == 3


def test_encoder_needs_a_token_that_hides_others_or_batches(tmp_path):
    with data_error(
        "data.masking.mask_id=-1 finds no [MASK] or <mask> in the tokenizer, nor an id "
        "of the model beyond the 61 of the tokenizer; set the id of a token that hides "
        "others"
    ):
        small_run.make_trainer(tmp_path, "model.kind=encoder")
    batch = next(iter(small_run.make_trainer(tmp_path / "data").loader))
    trainer = small_run.make_trainer(
        tmp_path, "model.kind=encoder", batches=[batch] * 8, num_devices=8
    )
    trainer.fit()
    losses = small_run.losses(tmp_path)
    assert losses[8] < losses[1]
    trainer.close()


def test_resuming_is_as_asked_and_from_the_same_model(tmp_path, whole):
    saved = whole.config.directory
    for directory, setting, message in (
        (tmp_path, "checkpoint.resume=required", "holds no checkpoint to resume from"),
        (saved, "checkpoint.resume=never", "holds a run at step 8; choose another"),
        (saved, "model.mlp_size=64", "differs from this model"),
    ):
        with pytest.raises(CheckpointError, match=message):
            small_run.make_trainer(directory, setting)


def test_weights_of_a_file_start_a_run(tmp_path, whole):
    path = tmp_path / "weights.safetensors"
    export_safetensors(whole.store, str(path))
    trainer = small_run.make_trainer(
        tmp_path / "new", f"checkpoint.init_from={path}", "zero.stage=3"
    )
    assert trainer.step == 0
    small_run.assert_equal(trainer, whole)
    trainer.close()


def test_reinforcement_learning_is_refused(tmp_path):
    given = "model.dropout_rate=0.0", "rl.rollout.max_new_tokens=4"
    text = "rl='rl' is not read by zjax.Trainer; use zjax rl, or zjax.rl.Trainer"
    with config_error(text):
        small_run.make_trainer(tmp_path, "rl.objective=grpo", *given)
