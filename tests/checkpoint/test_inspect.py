"""`zjax check` says what is wrong with which step, and what to type."""

import sys

import numpy as np
import pytest

from tests.checkpoint import states
from zjax.checkpoint.store import Store
from zjax.cli import main

VALUES = {"w": np.arange(96, dtype=np.float32).reshape(12, 8)}


@pytest.fixture
def run_directory(tmp_path):
    store = Store(str(tmp_path / "checkpoints"), keep_last=3)
    rows = states.make_rows(VALUES)
    for step in (8, 9, 10):
        store.save(step, states.place(VALUES, rows), rows, extra={})
    store.close()
    return tmp_path


def check(directory, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["zjax", "check", str(directory)])
    with pytest.raises(SystemExit) as end:
        main.run()
    said = capsys.readouterr()
    return end.value.code, said.out.splitlines(), said.err


def test_sound_steps(run_directory, monkeypatch, capsys):
    for place in (run_directory, run_directory / "checkpoints"):
        status, lines, _ = check(place, monkeypatch, capsys)
        assert status == 0
        assert lines[0] == f"{run_directory}/checkpoints"
        assert lines[1].split() == ["step", "files", "bytes", "state"]
        assert [line.split()[0] for line in lines[3:6]] == ["8", "9", "10"]
        assert all(line.endswith("intact") for line in lines[3:6])
        assert lines[6:] == ["a run resumes from step 10"]


def test_damaged_and_incomplete_steps(run_directory, monkeypatch, capsys):
    """Fails if the advice is no command, or leads to a step that is not whole."""
    place = run_directory / "checkpoints"
    index = place / "9/index/metadata"
    index.write_bytes(index.read_bytes().replace(b"float32", b"float64"))
    (place / "10/state/_METADATA").unlink()
    status, lines, _ = check(run_directory, monkeypatch, capsys)
    assert status == 1
    assert lines[3].endswith("intact")
    assert lines[4].endswith("damaged: index/metadata does not match its checksum")
    assert "not complete: state/_METADATA is missing" in lines[5]
    assert lines[6:] == ["to resume from step 8:", f"rm -r {place}/9"]
    (place / "8/index/metadata").unlink()
    status, lines, _ = check(run_directory, monkeypatch, capsys)
    assert (status, lines[-1]) == (
        1,
        "no step can be restored: start in another directory",
    )


def test_a_step_without_checksums_is_not_called_sound(
    run_directory, monkeypatch, capsys
):
    index = run_directory / "checkpoints/10/index/metadata"
    index.write_bytes(index.read_bytes().replace(b'"format": 2', b'"format": 1'))
    (run_directory / "checkpoints/10/sums").unlink()
    status, lines, _ = check(run_directory, monkeypatch, capsys)
    assert status == 3
    assert lines[5].endswith("unknown (no checksums)")
    assert lines[6:] == ["a run resumes from step 10"]


def test_where_there_is_nothing_to_check(tmp_path, monkeypatch, capsys):
    status, lines, error = check(tmp_path, monkeypatch, capsys)
    assert (status, lines) == (2, [])
    assert error == (
        f"zjax: checkpoint.directory='{tmp_path}' holds no complete checkpoint; give "
        "the directory that a run saved into, or start a new run\n"
    )
