"""Who ended how is written down where it counts, and ranked by what began."""

import os
import time

import jax
import pytest

from zjax import processes
from zjax.errors import CheckpointError, DataError, Problem
from zjax.processes import member_files
from zjax.processes.barrier import PeerError
from zjax.processes.member_files import End, Member

PROBLEM = Problem("checkpoint.step", 4, "could not be written", "look")


def lost_peer():
    error = CheckpointError(PROBLEM)
    error.__cause__ = jax.errors.JaxRuntimeError("UNAVAILABLE: Task 1 heartbeat")
    return error


def failed_peer():
    error = CheckpointError(PROBLEM)
    error.__cause__ = PeerError(1, "OSError: No space left on device", 28)
    return error


@pytest.mark.parametrize(
    ("error", "rank"),
    [
        pytest.param(DataError(PROBLEM), 1, id="its-own-fault"),
        pytest.param(jax.errors.JaxRuntimeError("UNAVAILABLE"), 2, id="lost-peer"),
        pytest.param(lost_peer(), 2, id="lost-peer-in-a-save"),
        pytest.param(failed_peer(), 2, id="save-of-a-peer"),
    ],
)
def test_a_survivor_is_not_the_cause(tmp_path, monkeypatch, error, rank):
    """Fails if the one that noticed is blamed, and not the one that was killed."""
    monkeypatch.setenv(member_files.MEMBERS_VARIABLE, str(tmp_path))
    member = Member(3, "a", os.getpid(), str(tmp_path / "run"))
    member_files.write_member(member, tmp_path)
    before = time.time()
    processes.record_failure(error)
    (end,) = member_files.read_ends(tmp_path, before)
    assert (end.process_id, end.rank) == (3, rank)


def test_a_process_that_was_turned_away_says_nothing_in_the_run_of_others(tmp_path):
    """Fails if the loser of two runs in one directory ends the winner's obituary."""
    shared, watched = member_files.shared_directory(str(tmp_path)), tmp_path / "watched"
    winner = Member(0, "a", 1, str(tmp_path))
    loser = Member(0, "a", 2, str(tmp_path))
    member_files.write_member(winner, shared)
    for member, told in ((loser, []), (winner, [0])):
        member_files.write_end(End(0, 1, "why"), member, watched)
        assert [end.process_id for end in member_files.read_ends(shared, 0.0)] == told
        assert [end.process_id for end in member_files.read_ends(watched, 0.0)] == [0]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        "7",
        '{"process_id": 0, "x": 1}',
        '{"process_id": "0", "host": "a", "pid": 1, "directory": "d"}',
        '{"process_id": 0, "rank": 0, "reason": "why", "at_seconds": "noon"}',
    ],
)
def test_records_of_others_are_left_out_by_name(tmp_path, caplog, text):
    member_files.write_member(Member(0, "a", 1, str(tmp_path)), tmp_path)
    (tmp_path / "1.member.json").write_text(text)
    (tmp_path / "1.end.json").write_text(text)
    assert list(member_files.read_members(tmp_path)) == [0]
    assert member_files.read_ends(tmp_path, 0.0) == []
    for name in ("1.member.json", "1.end.json"):
        assert f"{tmp_path / name} is not a record of this version" in caplog.text
