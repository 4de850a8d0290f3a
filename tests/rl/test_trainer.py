"""A run learns from its own texts, frees what drew them, and resumes bit for bit."""

import dataclasses
import json
import math
import os
import pathlib
import shutil
import signal
import time

import jax
import numpy as np
import pytest

from tests.support import rl_run
from tests.support.refusals import checkpoint_error, config_error, data_error
from zjax.errors import DataError, Problem
from zjax.generation.generator import Generator
from zjax.rl.sampler import Sampler
from zjax.rl.stopping import RolloutStopped
from zjax.rl.trainer import Trainer

SEVERAL = (
    "global_batch_size=8",
    "rl.rollout.num_prompts=4",
    "rl.num_epochs=2",
    "num_steps=5",
)
"""Four steps on a rollout, and one on the next."""


def device_bytes(arrays):
    """Bytes of all buffers on all devices: arrays of shards may share buffers."""
    shards = (shard.data for x in arrays for shard in x.addressable_shards)
    kept = [x for x in shards if not x.is_deleted()]
    return sum({x.unsafe_buffer_pointer(): x.nbytes for x in kept}.values())


def live_bytes():
    return device_bytes([x for x in jax.live_arrays() if not x.is_deleted()])


def assert_same(trainer, other):
    states = (jax.tree.map(np.asarray, each.state) for each in (trainer, other))
    jax.tree.map(np.testing.assert_array_equal, *states)


def told(directory):
    """Metrics by step, without times."""
    timed = ("seconds", "per_second", "share")
    return {
        row["step"]: {k: x for k, x in row.items() if not k.endswith(timed)}
        for row in rl_run.records(directory)
    }


def stop_after(last):
    def stop(step, state, batch, metrics):
        return "stop" if step == last else None

    return stop


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Three steps on eight devices, with what was alive after each step."""
    directory = tmp_path_factory.mktemp("whole")
    alive, drawing, unclosed = [], [], []
    opened = []  # keeps what is not closed from the collector of garbage

    def look(step, state, batch, metrics):
        jax.block_until_ready(state)
        held = device_bytes(jax.tree.leaves((state, batch)))
        alive.append(live_bytes() - held)
        unclosed.append(len(opened))

    generate, close = Generator.generate, Generator.close

    def watched(self, *args, **settings):
        opened.append(self)
        texts = generate(self, *args, **settings)
        drawing.append(live_bytes())
        return texts

    def closed(self):
        close(self)
        opened.remove(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Generator, "generate", watched)
        patch.setattr(Generator, "close", closed)
        before = live_bytes()
        trainer = rl_run.make_trainer(directory, after_step=[look])
        first = jax.tree.map(np.asarray, trainer.state.master)
        trainer.fit()
        trainer.close()
    return {
        "trainer": trainer,
        "directory": directory,
        "first": first,
        "before": before,
        "alive": alive,
        "drawing": drawing,
        "unclosed": unclosed,
    }


def test_weights_move_and_ratios_are_exactly_1(whole):
    """Fails if a step learns nothing, or compares with weights of another time."""
    moved = jax.tree.map(
        lambda x, y: not np.array_equal(x, np.asarray(y)),
        whole["first"],
        whole["trainer"].state.master,
    )
    assert all(jax.tree.leaves(moved))
    rows = rl_run.records(whole["directory"])
    assert [row["ratio"] for row in rows] == [1.0] * 3
    assert all(row["grad_norm"] > 0 for row in rows)
    assert {row["skipped_steps"] for row in rows} == {0.0}


def test_the_sampler_draws_by_the_probabilities_of_the_trainer(whole):
    """Fails if texts are drawn from other weights than those that learn."""
    for row in rl_run.records(whole["directory"]):
        assert row["sampler_kl"] < 1e-8
        assert row["sampler_off"] == 0


def test_generation_leaves_no_array_to_the_update(whole):
    """Fails if pages of keys, or a second copy of the weights, outlive a rollout."""
    state, plan = whole["trainer"].state, whole["trainer"].run.plan
    weights = 8 * sum(4 * math.prod(x.shape) for x in jax.tree.leaves(plan.compute))
    held = device_bytes(jax.tree.leaves(state)) + whole["before"]
    # While texts are drawn there are pages, and the weights once more, as passes read.
    for drawing in whole["drawing"]:
        assert weights < drawing - held < 2 * weights
    for alive in whole["alive"]:
        assert alive - whole["before"] < weights / 10


def test_the_generator_is_closed_before_the_update(whole):
    """Fails if only the collector of garbage ends the thread of a rollout."""
    assert len(whole["drawing"]) == 3
    assert whole["unclosed"] == [0, 0, 0]


def test_metrics_and_samples_are_written(whole):
    rows = rl_run.records(whole["directory"])
    names = "reward reward_std pass_at_1 pass_at_k completion_length truncated "
    names += "uniform_groups unscorable entropy clipped_low clipped_high sampler_kl "
    names += "rollout_seconds rollout_tokens_per_second"
    assert {*names.split()} <= {*rows[0]}
    assert {"update_tokens_per_second", "rollout_share"} <= {*rows[1]}
    assert 0 < rows[1]["rollout_share"] < 1
    files = sorted(x.name for x in (whole["directory"] / "samples").iterdir())
    assert files == ["1.txt", "2.txt", "3.txt"]
    text = (whole["directory"] / "samples" / "1.txt").read_text()
    assert text.startswith("prompt:\n")
    assert "reward " in text


def test_a_run_goes_on_bit_for_bit(whole, tmp_path):
    rl_run.fit(tmp_path, after_step=[stop_after(2)])
    resumed = rl_run.fit(tmp_path)
    assert_same(resumed, whole["trainer"])
    found, expected = told(tmp_path), told(whole["directory"])
    assert found == expected
    assert [*(tmp_path / "rollouts").glob("*")] == []


def test_a_signal_drops_the_rollout_in_flight(whole, tmp_path, monkeypatch):
    """Fails if a signal waits for all texts, or a part of a rollout is learned from."""
    generate, drawn = Generator.generate, []

    def stopped_later(self, *args, **settings):
        if len(drawn) == 1:  # the second rollout
            os.kill(os.getpid(), signal.SIGTERM)
        drawn.append(generate(self, *args, **settings))
        return drawn[-1]

    with monkeypatch.context() as patch:
        patch.setattr(Generator, "generate", stopped_later)
        trainer = rl_run.fit(tmp_path)
    assert {text.finish_reason for text in drawn[1]} == {"abort"}
    assert trainer.exit_status == 143
    assert trainer.store.steps() == (1,)
    assert_same(rl_run.fit(tmp_path), whole["trainer"])
    assert told(tmp_path) == told(whole["directory"])


def test_a_signal_drops_the_evaluation_in_flight(tmp_path, monkeypatch, caplog):
    """Fails if a signal waits for all held-out texts, or if a part of them counts."""
    evaluate = Trainer.evaluate

    def stopped(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self)

    monkeypatch.setattr(Trainer, "evaluate", stopped)
    given = "evaluation.num_batches=-1", "evaluation.every_steps=1", "num_steps=2"
    trainer = rl_run.fit(
        tmp_path, *given, evaluation_prompts=rl_run.PROMPTS[:2], num_devices=1
    )
    assert trainer.exit_status == 143
    assert trainer.store.steps() == (1,)
    assert "step 1: a signal ended the evaluation" in caplog.text
    assert not any("eval_reward" in row for row in rl_run.records(tmp_path))


def test_a_signal_before_the_first_step_names_no_checkpoint(
    tmp_path, monkeypatch, capsys
):
    def stop(self, first):
        os.kill(os.getpid(), signal.SIGTERM)
        raise RolloutStopped

    monkeypatch.setattr(Trainer, "_draw", stop)
    trainer = rl_run.make_trainer(tmp_path, num_devices=1)
    trainer.fit()
    trainer.close()
    assert trainer.exit_status == 143
    told = capsys.readouterr().out.splitlines()
    assert told[-3:-1] == [
        "stopped at step 0",
        "checkpoint: none, as no step was taken",
    ]


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    directory = tmp_path_factory.mktemp("several")
    return rl_run.fit(directory, *SEVERAL), directory


def test_later_steps_compare_with_the_weights_that_drew_the_texts(several):
    """Fails if the old policy moves with the policy."""
    ratios = [row["ratio"] for row in rl_run.records(several[1])]
    assert ratios[0] == pytest.approx(1, abs=1e-6)
    assert ratios[4] == pytest.approx(1, abs=1e-6)
    assert all(abs(ratio - 1) > 1e-5 for ratio in ratios[1:4])
    rewards = [row["reward"] for row in rl_run.records(several[1])]
    assert len({*rewards[:4]}) == 1


def test_a_rollout_in_flight_goes_on_bit_for_bit(several, tmp_path):
    """Fails if texts are drawn anew, or old log-probabilities are of new weights."""
    rl_run.fit(tmp_path, *SEVERAL, after_step=[stop_after(2)])
    assert [x.name for x in (tmp_path / "rollouts").iterdir()] == ["2.npz"]
    resumed = rl_run.fit(tmp_path, *SEVERAL)
    assert_same(resumed, several[0])
    assert told(tmp_path) == told(several[1])


def test_a_rollout_in_flight_is_learned_under_the_settings_that_drew_it(
    several, tmp_path
):
    """Fails if old log-probabilities meet logits of another temperature."""
    shutil.copytree(several[1], tmp_path / "run")
    given = *SEVERAL, "rl.rollout.temperature=0.7"
    told = "for the rollout that is half learned; restore it, or continue from a "
    told += "checkpoint between two rollouts"
    with data_error(f"rl.rollout.temperature=0.7 was 1.0 {told}"):
        rl_run.fit(tmp_path / "run", *given, "num_steps=6")


def test_a_rollout_in_flight_needs_rows_that_devices_divide(tmp_path):
    """Fails if the error of such rows names no setting."""
    given = "rl.num_epochs=2", "num_steps=2"
    rl_run.fit(tmp_path, *given, after_step=[stop_after(1)], num_devices=1)
    with np.load(tmp_path / "rollouts" / "1.npz") as file:
        rows = len(file["0/tokens"])
    told = f"num_microbatches=1 on 8 batch shards does not divide the {rows} rows of "
    told += "batches of the rollout that is half learned; use the devices and "
    told += "the microbatches of the saved run, or continue from a checkpoint between "
    told += "two rollouts"
    with data_error(told):
        rl_run.make_trainer(tmp_path, *given)


def test_a_run_is_saved_before_rewards_that_failed_end_it(tmp_path, monkeypatch):
    """Fails if steps are lost where a judge fails for all texts of a rollout."""
    draw, problem = Trainer._draw, Problem("rewards", "judge", "failed", "mend it")

    def fail_later(self, first):
        if self.step:
            raise DataError(problem)
        return draw(self, first)

    monkeypatch.setattr(Trainer, "_draw", fail_later)
    trainer = rl_run.make_trainer(tmp_path, "num_steps=3")
    with data_error(str(problem)):
        trainer.fit()
    assert trainer.store.latest() == 1
    trainer.close()


def test_a_damaged_rollout_is_refused(tmp_path):
    rl_run.fit(tmp_path, *SEVERAL, after_step=[stop_after(2)])
    path = tmp_path / "rollouts" / "2.npz"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    text = f"rollout='{path}' is not the file that the checkpoint was saved with; "
    with data_error(f"{text}restore the file, or continue from another checkpoint"):
        rl_run.make_trainer(tmp_path, *SEVERAL)


def test_other_prompts_are_refused_at_resume(whole, tmp_path):
    rl_run.fit(tmp_path, after_step=[stop_after(1)])
    state = json.loads(json.dumps(rl_run.make_trainer(tmp_path).loader.state()))
    digest = state["rl.prompts"]
    others = [{"prompt": "ab", "letter": "b"}]
    with pytest.raises(Exception, match=f"was '{digest}' in the saved run"):
        rl_run.make_trainer(tmp_path, prompts=others)


def test_an_objective_with_other_models_is_named_at_resume(tmp_path):
    """Fails if a run lists arrays that a checkpoint lacks, and no setting."""
    rl_run.fit(tmp_path, "num_steps=1")
    told = "rl.objective='ppo' was 'grpo' in the saved run, whose models are others; "
    told += f"restore it, or start another run with checkpoint.init_from={tmp_path}"
    with checkpoint_error(told):
        rl_run.make_trainer(tmp_path, "rl.objective=ppo")


def test_held_out_prompts_are_evaluated(tmp_path):
    """Fails if the speed of the update counts the time of an evaluation."""
    given = "evaluation.num_batches=-1", "rl.evaluation_samples=2", "num_steps=1"
    trainer = rl_run.make_trainer(
        tmp_path, *given, evaluation_prompts=rl_run.PROMPTS[:2]
    )
    first = trainer.evaluate()
    trainer._speed._update_began = began = time.perf_counter()
    assert first == trainer.evaluate()
    moved = trainer._speed._update_began - began
    assert moved > 0.9 * (time.perf_counter() - began)
    assert 0 <= first["eval_pass_at_1"] <= first["eval_pass_at_k"] <= 1
    assert first["eval_num_drawn_groups"] == 2
    assert math.isfinite(first["eval_reward"])
    trainer.close()


def test_groups_without_a_signal_are_drawn_again_up_to_a_bound(tmp_path):
    """Fails if dynamic sampling draws once, or without end."""
    rewards = "rl.rewards=[{'function': 'tests.support.rl_rewards:constant'}]"
    given = rewards, "rl.rollout.max_refills=2", "num_steps=1"
    rl_run.fit(tmp_path, *given)
    [row] = rl_run.records(tmp_path)
    assert row["num_drawn_groups"] == 6
    assert row["uniform_groups"] == 1
    assert row["grad_norm"] == 0


def test_rollouts_of_truncated_texts_alone_end_the_run(tmp_path, caplog, monkeypatch):
    """Fails if a run draws for ever where masks leave it nothing to learn from."""
    draw = Sampler.draw

    def cut(self, *args, **settings):
        drawn = draw(self, *args, **settings)
        return [dataclasses.replace(x, finish_reason="length") for x in drawn]

    monkeypatch.setattr(Sampler, "draw", cut)
    given = "rl.overlong=mask", "num_steps=1"
    message = (
        "rl.overlong='mask' leaves no text of 3 rollouts, as all were truncated; "
        "raise rl.rollout.max_new_tokens, or use 'keep'"
    )
    with data_error(message):
        rl_run.fit(tmp_path, *given)
    told = "step 1: all texts of a rollout were truncated, and are masked"
    assert caplog.messages.count(told) == 3


def test_a_rollout_of_several_steps_has_a_file_of_samples(several):
    """Fails if steps that begin no rollout are never logged."""
    assert {path.stem for path in several[1].joinpath("samples").iterdir()} >= {"4"}


def test_ppo_learns_values_beside_the_policy(tmp_path):
    """Fails if no value moves, or advantages are of texts in place of tokens."""
    trainer = rl_run.make_trainer(tmp_path, "rl.objective=ppo", "num_steps=2")
    seen = []
    draw = trainer.loader._draw
    trainer.loader._draw = lambda first: seen.append(draw(first)) or seen[-1]
    before = np.asarray(trainer.state.master["head"]["value"])
    trainer.fit()
    trainer.close()
    assert not before.any()
    assert np.asarray(trainer.state.master["head"]["value"]).any()
    first, second = (updates[0].batch["rl"] for updates, _ in seen)
    assert not first["values"].any()
    assert second["values"].any()
    given = second["advantages"][second["advantages"] != 0]
    assert abs(given.mean()) < 1e-5
    assert given.std(ddof=1) == pytest.approx(1, abs=1e-3)
    row = rl_run.records(tmp_path)[0]
    assert row["ratio"] == 1
    assert row["value_loss"] > 0


@pytest.mark.parametrize("kind", ["loss", "reward"])
def test_the_reference_is_where_the_run_started(whole, tmp_path, kind):
    """Fails if the reference moves with the policy, or with a resumed run."""
    objective = {"loss": "grpo", "reward": "reinforce_pp"}[kind]
    given = (
        f"checkpoint.init_from={whole['directory']}",
        f"rl.objective={objective}",
        f"rl.reference={kind}",
        "rl.reference.coefficient=0.5",
    )
    rl_run.fit(tmp_path, *given, after_step=[stop_after(2)])
    rl_run.fit(tmp_path, *given)
    rows = rl_run.records(tmp_path)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-9)
    assert all(row["kl"] > 1e-9 for row in rows[1:])


def test_the_reference_of_adapters_takes_no_memory(whole, tmp_path):
    """Fails if LoRA, ZeRO 3 and tensor parallelism keep a copy, or nothing moves."""
    before = live_bytes()
    trainer = rl_run.make_trainer(
        tmp_path,
        f"checkpoint.init_from={whole['directory']}",
        "lora.rank=2",
        "zero.stage=3",
        "mesh.tensor=2",
        "rl.reference=loss",
        "rl.reference.coefficient=0.5",
        "num_steps=2",
    )
    state = device_bytes(jax.tree.leaves(trainer.state))
    reference = live_bytes() - before - state
    weights = sum(4 * math.prod(x.shape) for x in jax.tree.leaves(whole["first"]))
    assert reference < weights / 100
    trainer.fit()
    trainer.close()
    first, second = rl_run.records(tmp_path)
    assert first["kl"] == pytest.approx(0, abs=1e-9)
    assert second["kl"] > 1e-9
    assert first["sampler_kl"] < 1e-8


def test_texts_are_of_the_weights_that_learn_beside_an_average(tmp_path):
    """Fails if a rollout draws from the average, or no evaluation reads it."""
    trainer = rl_run.make_trainer(
        tmp_path,
        "optimizer.ema_decay=0.9",
        "optimizer.peak_learning_rate=0.1",
        "evaluation.num_batches=-1",
        "rl.evaluation_samples=4",
        evaluation_prompts=rl_run.PROMPTS,
    )
    trainer.fit()
    for row in rl_run.records(tmp_path):
        assert row["sampler_kl"] < 1e-8
        assert row["sampler_off"] == 0
    average, raw = (trainer.evaluate(part) for part in ("ema", "raw"))
    assert average != raw
    assert trainer.evaluate() == average
    trainer.close()


def test_the_trainer_replays_the_experts_of_the_sampler(tmp_path, monkeypatch):
    """Fails if texts come without experts, or the trainer has its own program."""
    batches = []

    def look(step, state, batch, metrics):
        batches.append(jax.tree.map(np.asarray, batch))

    experts = ("model.moe=token_choice", "model.moe.num_experts=4", "num_steps=2")
    trainer = rl_run.fit(tmp_path, *experts, after_step=[look], num_devices=1)
    shapes = {batch["tokens"].shape for batch in batches}
    assert trainer.run.step.programs["train"]._cache_size() == len(shapes)
    for batch in batches:
        known, segments = batch["experts"] >= 0, batch["segment_ids"]
        # Of all tokens but the last of each text.
        is_last = (segments > 0) & (segments != np.roll(segments, -1, axis=1))
        wanted = (segments > 0) & ~is_last
        assert (known == wanted[..., None, None]).all()


def test_what_a_run_lacks_is_told_at_once(tmp_path):
    text = (
        "rl.prompts='' names no prompts; give a file of JSON Lines\n"
        "rl.rewards=() gives texts no reward; name functions, such as "
        "'zjax.rl.tasks.sums:reward'"
    )
    with config_error(text):
        rl_run.make_trainer(tmp_path, "rl.rewards=()", prompts=None)
    text = "rl=None says nothing of texts or rewards; set rl.objective, or use "
    with config_error(text + "zjax train"):
        rl_run.make_trainer(tmp_path, "rl=None")


def test_long_prompts_are_refused(tmp_path):
    text = "rl.prompts='given' has 12 tokens in record 2, and data.length less "
    text += "rl.rollout.max_new_tokens leaves 10 (1 prompts are too long); shorten "
    text += "the prompt, or raise data.length"
    prompts = [{"prompt": "a"}, {"prompt": "b" * 12}]
    with config_error(text):
        rl_run.make_trainer(tmp_path, prompts=prompts)


def test_files_of_prompts_are_read_by_line(tmp_path):
    path = pathlib.Path(tmp_path) / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": \n')
    text = f"rl.prompts='{path}' is no JSON in line 2 (Expecting value); give "
    text += "JSON Lines with 'prompt' or 'messages' in each"
    with data_error(text):
        rl_run.make_trainer(tmp_path, f"rl.prompts={path}", prompts=None)
    text = "rl.prompts=\"{'text': 'a'}\" has 0 of 'prompt' and 'messages' in record 1; "
    with data_error(text + "give one of them"):
        rl_run.make_trainer(tmp_path, prompts=[{"text": "a"}])
