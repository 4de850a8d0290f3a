"""Steps come with one rename, once all is kept, and go with one."""

import os
import pathlib
import shutil

import numpy as np
import pytest

from tests.checkpoint import states
from zjax.checkpoint import steps
from zjax.checkpoint.store import Store

VALUES = {"w": np.arange(96, dtype=np.float32).reshape(12, 8)}


def save(store, *numbers):
    rows = states.make_rows(VALUES)
    for number in numbers:
        store.save(number, states.place(VALUES, rows), rows, extra={})
    store.close()


def test_files_and_folders_are_synced_before_the_rename(tmp_path, monkeypatch):
    """Fails if a power loss can leave a step with empty files, or without its name."""
    done, sync, rename = [], os.fsync, os.rename

    def spy(number):
        sync(number)
        done.append(os.readlink(f"/proc/self/fd/{number}"))

    def rename_spy(old, new):
        rename(old, new)
        done.append((str(old), str(new)))

    monkeypatch.setattr(os, "fsync", spy)
    monkeypatch.setattr(os, "rename", rename_spy)
    top = tmp_path / "run" / "checkpoints"
    save(Store(str(top)), 1)
    (renamed,) = (number for number, item in enumerate(done) if isinstance(item, tuple))
    partial, named = done[renamed]
    assert named == f"{top}/1"
    before = set(done[:renamed])
    for path in [top / "1", *(top / "1").rglob("*")]:
        assert f"{partial}{str(path).removeprefix(named)}" in before, path
    assert {str(tmp_path), str(tmp_path / "run")} <= before  # which were made, too
    assert str(top) in done[renamed:]


def test_later_steps_are_set_aside_and_nothing_is_lost(tmp_path):
    """Fails if a run would go on from a later step, or a second rewind replaces one."""
    for number in (1, 2, 10):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "file").write_text(f"first {number}")
        steps.old_links(tmp_path / str(number)).mkdir(parents=True)
    moved = steps.set_aside(tmp_path, 1)
    assert [path.name for path in moved] == ["set-aside-2", "set-aside-10"]
    assert steps.named_steps(tmp_path) == [1]
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "file").write_text("second 2")
    [again] = steps.set_aside(tmp_path, 1)
    assert (again / "file").read_text() == "second 2"
    assert (tmp_path / "set-aside-2" / "file").read_text() == "first 2"
    steps.clear(tmp_path)
    assert (tmp_path / "set-aside-10" / "file").read_text() == "first 10"
    assert steps.old_links(tmp_path / "set-aside-10").is_dir()


def test_a_step_that_is_being_deleted_is_not_there(tmp_path, monkeypatch):
    """Fails if files go before the name does."""
    store = Store(str(tmp_path), keep_last=1, keep_best=0)
    save(store, 1)
    seen, remove = [], shutil.rmtree

    def interrupted(path, **options):
        if os.path.exists(path) and ".deleted-" in str(path):
            seen.append((pathlib.Path(path).name, Store(str(tmp_path)).steps()))
        else:
            remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    save(store, 2)
    assert seen == [(".deleted-1", (2,))]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".deleted-1", "2"]
    monkeypatch.undo()
    save(Store(str(tmp_path), keep_last=1, keep_best=0), 3)
    assert [p.name for p in tmp_path.iterdir()] == ["3"]


def test_a_step_that_cannot_be_deleted_is_told(tmp_path, monkeypatch, caplog):
    """Fails if the new step is lost for it."""
    store = Store(str(tmp_path), keep_last=1, keep_best=0)
    save(store, 1)

    def refuse(path):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(steps, "remove", refuse)
    save(store, 2)
    assert store.steps() == (1, 2)
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{tmp_path}/1 cannot be deleted (Operation not permitted)"
    )


@pytest.mark.parametrize("name", ["01", "1.5", "-1", "x", ".saving-7-1", ".deleted-7"])
def test_other_names_are_no_steps(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / "5").touch()
    assert steps.named_steps(tmp_path) == []


def test_what_older_versions_left_goes_with_the_next_save(tmp_path):
    (tmp_path / "2.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    (tmp_path / "linked" / "9").mkdir(parents=True)
    save(Store(str(tmp_path)), 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3", "linked"]
    assert list((tmp_path / "linked").iterdir()) == []
