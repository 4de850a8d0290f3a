"""The contest of codecs against a copy, small, to the end."""

import json
import sys

import pytest
from contests.contest import load_contest

from tests.support.benchmarks import FOLDER, load


@pytest.fixture
def printed(monkeypatch, capsys):
    """What a program prints for a short round and few numbers."""

    def run(contestant):
        script, *flags = contestant.command[1:]
        module = load(script.rpartition("/")[2].removesuffix(".py"))
        monkeypatch.setattr(module.call_timing, "ROUND_SECONDS", 0)
        few = [flag for flag in flags if not flag.startswith("--num_floats=")]
        monkeypatch.setattr(sys, "argv", [script, *few, "--num_floats=8192"])
        module.main()
        return json.loads(capsys.readouterr().out.removeprefix("RESULT "))

    return run


def test_codecs_are_measured_against_a_copy(printed):
    contest = load_contest(FOLDER / "compress_overhead.py")
    ours, copy = map(printed, contest.contestants)
    for case in contest.rows[0].cases:
        for metric, found in ((case.metric, ours), (case.peer_metric, copy)):
            assert found[metric]["n"] == 7
            assert 0 < found[metric]["min"] <= found[metric]["median"]


def test_all_numbers_are_in_whole_blocks():
    """Fails if a codec pads, or the copy is of another size."""
    contest = load_contest(FOLDER / "compress_overhead.py")
    sizes = {
        int(word.partition("=")[2])
        for contestant in contest.contestants
        for word in contestant.command
        if word.startswith("--num_floats=")
    }
    (size,) = sizes
    assert size % 4096 == 0
    assert size == pytest.approx(1.5e9, rel=0.01)
