"""Files of half-learned rollouts are kept, checked and set aside with checkpoints."""

import pathlib

import numpy as np
import pytest

from tests.support.refusals import data_error
from zjax.checkpoint.verify import INTACT, Verdict
from zjax.rl import rollout_files
from zjax.rl.stopping import RolloutStopped, until

BATCHES = [{"tokens": np.arange(4), "rl": {"units": np.ones(2, np.float32)}}] * 2


@pytest.fixture
def run(tmp_path):
    """Files of the steps 2, 4 and 6, and what the checkpoint of 4 says of its file."""
    folder = tmp_path / rollout_files.FOLDER
    for step in (2, 6):
        rollout_files.write(rollout_files.path_at(folder, step), BATCHES)
    left = rollout_files.write(rollout_files.path_at(folder, 4), BATCHES)
    return tmp_path, folder, {**left, "values": [{}, {}]}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_batches_are_read_as_they_were_written(run):
    _, folder, left = run
    for batch in rollout_files.read(folder, left):
        np.testing.assert_array_equal(batch["tokens"], BATCHES[0]["tokens"])
        np.testing.assert_array_equal(batch["rl"]["units"], np.ones(2, np.float32))


def test_files_of_killed_runs_and_of_other_steps_are_removed(run):
    """Fails if a partial file stays for ever, or a file that was set aside goes."""
    _, folder, _ = run
    for name in (".8.npz.partial", "set-aside-9.npz", "notes.npz"):
        (folder / name).write_bytes(b"")
    rollout_files.forget(folder, [4])
    assert names(folder) == ["4.npz", "notes.npz", "set-aside-9.npz"]


def test_files_of_later_steps_are_set_aside_and_never_overwritten(run):
    directory, folder, _ = run
    moved = rollout_files.set_aside(directory, 2)
    assert [path.name for path in moved] == ["set-aside-4.npz", "set-aside-6.npz"]
    rollout_files.write(rollout_files.path_at(folder, 4), BATCHES)
    [again] = rollout_files.set_aside(directory, 2)
    assert again.name == "set-aside-4.1.npz"
    assert "2.npz" in names(folder)


def test_no_folder_is_nothing_to_set_aside_or_forget(tmp_path):
    assert rollout_files.set_aside(tmp_path, 0) == []
    rollout_files.forget(tmp_path / rollout_files.FOLDER, [])


def test_the_verdict_of_a_checkpoint_reads_its_rollout(run, monkeypatch):
    """Fails if `zjax check` calls a checkpoint intact that cannot be resumed from."""
    directory, folder, left = run
    monkeypatch.setattr(
        rollout_files.Reader,
        "index",
        lambda self, step: {"extra": {"data": {"left": left}}},
    )
    verdict = Verdict(pathlib.Path(directory, "checkpoints", "4"), 1, 1, INTACT)
    assert rollout_files.inspect(verdict) == verdict
    path = folder / "4.npz"
    content = bytearray(path.read_bytes())
    content[60] ^= 1
    path.write_bytes(content)
    wrong = "damaged: rollouts/4.npz is not the file that the checkpoint was saved with"
    assert rollout_files.inspect(verdict).problem == wrong
    told = f"rollout='{path}' is not the file that the checkpoint was saved with; "
    with data_error(f"{told}restore the file, or continue from another checkpoint"):
        rollout_files.read(folder, left)
    path.unlink()
    wrong = "damaged: rollouts/4.npz cannot be read (No such file or directory)"
    assert rollout_files.inspect(verdict).problem == wrong


def test_a_signal_ends_the_scores_of_texts():
    asked = iter([False, True])
    with pytest.raises(RolloutStopped):
        list(until(lambda: next(asked), [1, 2, 3]))
