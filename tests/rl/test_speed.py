"""Speed of rollouts and updates, by a clock that counts."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support import rl_run
from zjax import rl
from zjax.config import load_config
from zjax.models.flops import flops_per_token
from zjax.rl import speed

CONFIG = load_config(rl_run.SETTINGS, "observe.peak_tflops=2.0", "model.num_layers=3")
BATCHES = [
    {"segment_ids": np.array([[1, 1, 1, 2, 0, 0], [1, 0, 0, 0, 0, 0]])},
    {"segment_ids": np.array([[1, 1, 1, 1, 1, 1]])},
]
LENGTHS = np.array([3, 1, 1, 6])


def texts(*sizes):
    more = {"prompt_ids": [0], "logprobs": np.zeros(1), "experts": None}
    return [SimpleNamespace(ids=np.zeros(size), **more) for size in sizes]


def timed(learners=1, config=CONFIG):
    """A rollout of 4 s, an update of 8 s with 5 s of other work, a rollout of 2 s."""
    ticks = iter([0.0, 4.0, 10.0, 11.0, 16.0, 23.0, 25.0]).__next__
    policy = rl.policy_model(config, rl.Objective())
    found = speed.Speed([(policy, config)] * learners, 4, clock=ticks)
    found.begin_rollout()
    found.add_texts(texts(5, 7))
    found.add_texts(texts(8))
    first = found.end_rollout()
    found.begin_update(BATCHES)
    with found.excluded():
        pass
    found.begin_rollout()
    found.add_texts(texts(6))
    return first, found.end_rollout()


def test_each_half_has_its_tokens_and_its_time():
    """Fails if a rollout counts texts of the one before, or an update other work."""
    first, second = timed()
    assert first == {"rollout_seconds": 4.0, "rollout_tokens_per_second": 5.0}
    assert second["rollout_tokens_per_second"] == 3.0
    assert second["update_tokens_per_second"] == 11 / 8
    assert second["rollout_share"] == 2 / 10


def test_mfu_counts_each_text_alone():
    """Fails if a token counts attention to the row, or one model of two is left out."""

    def per_token(length):
        return flops_per_token(CONFIG.model, length, causal_attention="half")

    long, short = per_token(16), per_token(8)
    assert long > short
    slope = (long - short) / 8
    flops = sum(n * (long + slope * (n - 16)) for n in LENGTHS.tolist())
    expected = flops / (8 * 4 * 2e12)
    assert timed()[1]["update_mfu"] == pytest.approx(expected, rel=1e-6)
    assert timed(2)[1]["update_mfu"] == pytest.approx(2 * expected, rel=1e-6)


def test_no_peak_gives_no_mfu():
    observe = dataclasses.replace(CONFIG.observe, peak_tflops=0.0)
    config = dataclasses.replace(CONFIG, observe=observe)
    assert "update_mfu" not in timed(config=config)[1]


def test_a_rollout_counts_the_texts_that_refills_replace(tmp_path, monkeypatch):
    """Fails if speed counts the time of all texts, and the tokens of those kept."""
    drawn = []
    add = speed.Speed.add_texts

    def added(self, rollouts):
        drawn.append(len(rollouts))
        add(self, rollouts)

    monkeypatch.setattr(speed.Speed, "add_texts", added)
    rewards = "rl.rewards=[{'function': 'tests.support.rl_rewards:constant'}]"
    given = rewards, "rl.rollout.max_refills=2", "num_steps=2"
    rl_run.fit(tmp_path, *given, "observe.peak_tflops=1.0", num_devices=1)
    assert drawn == [24, 24]
    first, second = rl_run.records(tmp_path)
    assert "update_mfu" not in first
    assert second["update_mfu"] > 0
