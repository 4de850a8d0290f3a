"""Saved reward models and functions judge the texts of a run together."""

import dataclasses

import numpy as np
import pytest

from tests.rl.test_reward_run import save
from tests.support import rl_run
from tests.support.refusals import checkpoint_error, data_error
from zjax import rl
from zjax.rl.report import pass_rates

BYTES = {"model.vocab_size": 257, "data.source": "standard_library"}
PLAIN = "tests.support.rl_rewards:plain"


def rewards(*entries):
    return f"rl.rewards={[*entries]!r}"


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    directory = tmp_path_factory.mktemp("judge")
    save(directory, **BYTES)
    return str(directory)


@pytest.fixture(scope="module")
def mixed(judge, tmp_path_factory):
    """A step by a judge and a function, with the texts as they were scored."""
    given = {"kind": "run", "directory": judge, "memory": "pinned_host", "weight": 2.0}
    directory = tmp_path_factory.mktemp("mixed")
    entries = rewards(given, {"function": PLAIN, "weight": -0.5})
    trainer = rl_run.make_trainer(directory, entries, "num_steps=1", num_devices=2)
    seen, score = [], trainer._judges.score
    trainer._judges.score = lambda x, **given: seen.extend(score(x, **given)) or seen
    trainer.fit()
    trainer.close()
    return trainer, directory, seen


def test_a_judge_and_a_function_add_up(judge, mixed):
    """Fails if a judge counts for nothing, or with another weight."""
    trainer, directory, texts = mixed
    expected = rl.RewardRun(judge, trainer.run).score(texts)
    found = [x.rewards[judge] for x in texts]
    assert found == pytest.approx(expected, rel=1e-5)
    assert len({*found}) > 1
    totals = [
        2 * x - 0.5 * text.rewards[PLAIN]
        for x, text in zip(expected, texts, strict=True)
    ]
    [row] = rl_run.records(directory)
    assert row["reward"] == pytest.approx(np.mean(totals), rel=1e-5)
    assert row[f"reward/{judge}"] == pytest.approx(np.mean(expected), rel=1e-5)
    assert "pass_at_1" in row


def test_a_text_that_a_function_fails_for_is_not_judged_alone(judge, mixed):
    """Fails if the judge's share of a reward stands for the whole."""
    _, _, texts = mixed
    name = "tests.support.rl_rewards:fails_for_some"
    given = [dataclasses.replace(texts[0], row={"letter": ""}), texts[1]]
    with rl.RewardPool([name], num_processes=1) as pool:
        failed, scored = pool.score(given)
    assert {*failed.rewards.values()} == {None}
    assert scored.rewards == {**texts[1].rewards, name: 0.5}


def test_a_text_that_one_judge_leaves_unscored_is_not_solved():
    """Fails if the first function alone says what is solved."""
    given = [{PLAIN: 1.0, "b": 0.0}, {PLAIN: 1.0, "b": None}, {PLAIN: 0.5, "b": 1.0}]
    drawn = {"given": "", "prompt_ids": [1], "ids": [2], "logprobs": [-0.5], "text": ""}
    drawn |= {"sample": 0, "finish_reason": "stop"}
    texts = [rl.Rollout(prompt=n, rewards=x, **drawn) for n, x in enumerate(given)]
    assert pass_rates(texts, PLAIN) == {"pass_at_1": 1 / 3, "pass_at_k": 1 / 3}


def test_judges_that_do_not_fit_are_refused_at_the_start(tmp_path):
    other = {"model.value_head": False, "model.vocab_size": 43}
    save(tmp_path / "other", **other)
    kinds = [{"kind": "run", "directory": str(tmp_path / x)} for x in ("none", "other")]
    text = "\n".join(
        [
            f"rl.rewards[1].directory='{tmp_path / 'none'}' holds no checkpoint; give "
            "the directory of a run",
            f"rl.rewards[2].directory='{tmp_path / 'other'}' has no values; train it "
            "with preference=reward_model",
            f"rl.rewards[2].directory='{tmp_path / 'other'}' has 43 tokens, and the "
            "policy 257; train it with the policy's tokenizer",
            f"rl.rewards[2].directory='{tmp_path / 'other'}' has the tokenizer "
            "'numbers', and the policy 'bytes' with other tokens; train it with the "
            "policy's tokenizer",
        ]
    )
    with checkpoint_error(text):
        rl_run.make_trainer(tmp_path / "run", rewards({"function": PLAIN}, *kinds))


def test_a_judge_that_was_trained_further_is_refused(judge, mixed):
    trainer, _, _ = mixed
    state = trainer.loader.state()
    name = f"step of {judge}"
    assert state[name] == 0
    text = f"{name}=0 was 3 in the saved run, so its texts are not these; restore that "
    with data_error(f"{text}setting or that data, or start a new run"):
        trainer.loader.set_state({**state, name: 3})


def test_texts_that_no_judge_can_read_end_the_run(judge, mixed, monkeypatch):
    trainer, _, texts = mixed
    run = trainer._judges._runs[judge]
    monkeypatch.setattr(run, "_length", 1)
    text = f"rewards={judge!r} scores none of the texts; shorten the texts"
    with data_error(text):
        type(trainer._judges).score(trainer._judges, texts)
