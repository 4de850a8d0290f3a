"""Steps come whole, with one rename; a save that fails is told soon, and by whom."""

import logging
import os
import pathlib
import shutil
import threading

import jax
import numpy as np
import pytest
from jax._src import distributed

from tests.checkpoint import states
from tests.support import small_run
from tests.support.refusals import checkpoint_error
from zjax.checkpoint import steps, writer
from zjax.checkpoint.steps import hide_orbax_errors
from zjax.checkpoint.store import Store
from zjax.checkpoint.sums import Task, map_in_threads
from zjax.errors import CheckpointError
from zjax.processes.barrier import PeerError, barrier, describe_error

VALUES = {"w": np.arange(96, dtype=np.float32).reshape(12, 8)}


def fail(*_):
    raise OSError(28, "No space left on device")


def test_a_save_that_failed_ends_the_run_before_the_next_save(tmp_path, monkeypatch):
    """Fails if a run goes on for hours without a checkpoint to resume from."""
    trainer = small_run.make_trainer(
        tmp_path, "num_steps=60", "checkpoint.every_steps=20", num_devices=1
    )
    monkeypatch.setattr(writer, "_write", fail)
    with checkpoint_error(
        f"checkpoint.step=20 could not be written to {tmp_path}/checkpoints (OSError: "
        "[Errno 28] No space left on device); free disk space or repair the file "
        "system, and run again: there is none before it"
    ):
        trainer.fit()
    assert 20 <= trainer.step < 40


def test_a_save_for_which_nobody_waited_is_told_at_the_end(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(writer, "_write", fail)
    rows = states.make_rows(VALUES)
    store = Store(str(tmp_path))
    store.save(1, states.place(VALUES, rows), rows, extra={})
    writer._finish_at_exit()
    assert caplog.messages == [
        "a checkpoint that nobody waited for is lost: [Errno 28] No space left on "
        "device"
    ]
    with pytest.raises(CheckpointError):
        store.close()


def test_no_two_saves_share_a_directory_though_each_has_its_store(
    tmp_path, monkeypatch
):
    """Fails if threads of a save that failed write into the next one."""
    used = []
    monkeypatch.setattr(
        writer, "_write", lambda partial, *_: used.append(partial) or fail()
    )
    for _ in range(2):
        with pytest.raises(CheckpointError):
            states.save(tmp_path, VALUES, 1)
    assert len(set(used)) == 2


def test_who_missed_a_meeting_of_a_failed_save_is_at_the_next(monkeypatch):
    """Fails if barriers are counted, and a process that failed waits for others."""
    client = Client()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(distributed.global_state, "client", client)
    failed, next_one = pathlib.Path("/a/.saving-1-1"), pathlib.Path("/a/.saving-2-2")
    for saves in ([failed, next_one], [next_one]):
        for partial in saves:
            with barrier(writer.barrier_name(partial, "write")):
                pass
    keys = client.met
    assert keys[1] == keys[2] == "zjax-checkpoint.saving-2-2-write"
    assert keys[0] != keys[1]


class Client:
    """A coordinator to which no process has told a failure."""

    def __init__(self):
        self.met = []

    def wait_at_barrier(self, key, _):
        self.met.append(key)

    def key_value_dir_get(self, _):
        return []


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
    states.save(top, VALUES, 1)
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
    states.save(tmp_path, VALUES, 1, keep_last=1)
    seen, remove = [], shutil.rmtree

    def interrupted(path, **options):
        if os.path.exists(path) and ".deleted-" in str(path):
            seen.append((pathlib.Path(path).name, Store(str(tmp_path)).steps()))
        else:
            remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    states.save(tmp_path, VALUES, 2, keep_last=1)
    assert seen == [(".deleted-1", (2,))]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".deleted-1", "2"]
    monkeypatch.undo()
    states.save(tmp_path, VALUES, 3, keep_last=1)
    assert [p.name for p in tmp_path.iterdir()] == ["3"]


def test_a_step_that_cannot_be_deleted_is_told(tmp_path, monkeypatch, caplog):
    """Fails if the new step is lost for it."""
    states.save(tmp_path, VALUES, 1)

    def refuse(path):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(steps, "remove", refuse)
    store = states.save(tmp_path, VALUES, 2, keep_last=1)
    assert store.steps() == (1, 2)
    told = f"{tmp_path}/1 cannot be deleted (Operation not permitted)"
    assert caplog.messages == [told]


@pytest.mark.parametrize("name", ["01", "1.5", "-1", "x", ".saving-7-1", ".deleted-7"])
def test_other_names_are_no_steps(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / "5").touch()
    assert steps.named_steps(tmp_path) == []


def test_what_older_versions_left_goes_with_the_next_save(tmp_path):
    (tmp_path / "2.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    (tmp_path / "linked" / "9").mkdir(parents=True)
    states.save(tmp_path, VALUES, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3", "linked"]
    assert list((tmp_path / "linked").iterdir()) == []


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [
        (
            OSError("No space left on device"),
            "free disk space or repair the file system",
        ),
        (
            ValueError("PERMISSION_DENIED: Error writing [OS error 13: EACCES]"),
            "give this user access to it",
        ),
        (PeerError(1, "OSError: read-only", 30), "make the file system writable"),
        (
            jax.errors.JaxRuntimeError("UNAVAILABLE: Task 1 heartbeat timeout"),
            "find the process that ended or the device that failed",
        ),
    ],
)
def test_nobody_makes_room_for_a_process_that_was_killed(cause, remedy):
    error = ValueError("could not save")
    error.__cause__ = cause
    assert str(steps.unwritten(pathlib.Path("/run"), 4, 2, error)) == (
        f"checkpoint.step=4 could not be written to /run ({describe_error(cause)}"
        f"); {remedy}, and run again: step 2 is intact"
    )


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [
        (OSError(24, "Too many open files"), "raise the limit of open files, "),
        (OSError(13, "Permission denied"), "give this user access to it, and "),
        (OSError(5, "Input/output error"), "delete /run/4 to go on from step 2"),
        (ValueError("a.bin does not match"), "delete /run/4 to go on from step 2"),
    ],
)
def test_nobody_deletes_a_step_that_this_process_cannot_open(cause, remedy):
    assert f"; {remedy}" in str(steps.damaged(pathlib.Path("/run"), 4, 2, cause))


ORBAX = ValueError("cannot write 2.orbax-checkpoint-tmp")
READ = ValueError("OUT_OF_RANGE: Error opening [tensorstore_spec='{}']")
OTHER = ValueError("a mistake of someone else")


@pytest.mark.parametrize(
    ("name", "level", "error", "shown"),
    [
        pytest.param("absl", logging.ERROR, ORBAX, False, id="failed-save"),
        pytest.param("absl", logging.ERROR, OTHER, True, id="other-failure"),
        pytest.param("absl", logging.WARNING, None, True, id="warning"),
        pytest.param("asyncio", logging.ERROR, ORBAX, False, id="task-of-orbax"),
        pytest.param("asyncio", logging.ERROR, READ, False, id="read-for-orbax"),
        pytest.param("asyncio", logging.ERROR, OTHER, True, id="other-task"),
        pytest.param("zjax", logging.ERROR, ORBAX, True, id="other-logger"),
    ],
)
def test_others_are_heard(name, level, error, shown, caplog):
    hide_orbax_errors()
    text = "orbax is slow" if error is None else "it failed"
    info = None if error is None else (type(error), error, None)
    logger = logging.getLogger(name)
    logger.handle(logging.LogRecord(name, level, "file.py", 1, text, (), info))
    assert [record.message for record in caplog.records] == [text] * shown


def test_a_thread_and_those_that_it_starts_end_with_the_process():
    """Fails if one of Orbax that hangs keeps a process from its end."""

    def kinds():
        return threading.current_thread().daemon, threading.Thread().daemon

    assert Task("any", kinds).result() == (True, True)
    assert map_in_threads(lambda _: kinds(), range(3), 2) == 3 * [(True, True)]


def test_results_and_errors_come_once_the_threads_have_ended():
    """Fails if what a thread holds is taken down while the process ends."""
    go_on = threading.Event()
    task = Task("any", go_on.wait)
    assert not task.done()
    go_on.set()
    assert task.result() is True
    assert task.done()

    def act(number):
        if number == 2:
            raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        map_in_threads(act, range(9), 3)
