"""The contest of exposed communication, small, to the end."""

import json
import sys

import jax
import pytest
from contests.contest import load_contest

from tests.support.benchmarks import FOLDER, load
from zjax.config import load_config
from zjax.optim.phases import make_rounds

SMALL = (
    "num_steps=64",
    "global_batch_size=4",
    "microbatch_size=2",
    "communication.local_steps.num_steps=8",
    "communication.local_steps.num_fragments=2",
    "communication.local_steps.delay=1",
    "model.num_layers=2",
    "model.embed_size=32",
    "model.num_heads=2",
    "model.vocab_size=64",
    "model.max_length=16",
    "data.length=16",
    "optimizer.schedule.num_warmup_steps=1",
)


@pytest.fixture
def module():
    return load("streaming_rounds")


@pytest.fixture
def contest():
    return load_contest(FOLDER / "streaming_exposed.py")


def test_rounds_are_measured_against_local_steps(
    module, contest, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(module, "WARM_UP_ROUNDS", 1)
    devices = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    words = contest.contestants[0].command[1:]
    small = (*SMALL, f"directory={tmp_path}")
    monkeypatch.setattr(sys, "argv", [*words, *small])
    module.main()
    line, *table = capsys.readouterr().out.splitlines()
    found = json.loads(line.removeprefix("RESULT "))
    (case,) = contest.rows[0].cases
    assert found["num_devices"] == 2
    assert found["step_seconds"]["n"] == found["local_step_seconds"]["n"] == 5
    mean = found["step_seconds"]["median"]
    assert found[case.metric] == found["exposed_seconds"] / mean > 0
    assert table[0].split("  ")[0] == "milliseconds per step"


def test_what_exchanges_add_is_the_mean_over_a_round(module):
    rounds = module.Rounds(num_local_steps=8, num_fragments=2, delay=1)
    seconds = [1, 1, 1.5, 2, 1, 1, 1.5, 2]
    assert module.added_by_exchanges(rounds, seconds) == pytest.approx(3 / 8)


def test_the_row_is_about_four_fragments_in_int4_on_two_replicas(contest, module):
    """Fails if the other run exchanges anything while it is timed."""
    path, *settings = contest.contestants[0].command[2:]
    config = load_config(path, *settings)
    communication = config.communication
    assert (communication.codec, communication.local_steps.num_fragments) == ("int4", 4)
    assert communication.local_steps.delay > 0
    assert config.mesh.replica == 2
    rounds = make_rounds(module.without_exchange(config))
    number = module.WARM_UP_ROUNDS + module.TIMED_ROUNDS
    steps = range(1, number * communication.local_steps.num_steps + 1)
    assert not any(rounds.sent_after(step) is not None for step in steps)
