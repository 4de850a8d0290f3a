"""A save that fails is told soon, whoever waits for it."""

import pathlib

import jax
import numpy as np
import pytest
from jax._src import distributed

from tests.checkpoint import states
from tests.support import small_run
from zjax.checkpoint import writer
from zjax.checkpoint.store import Store
from zjax.errors import CheckpointError
from zjax.processes.barrier import barrier


def fail(*_):
    raise OSError(28, "No space left on device")


def test_a_save_that_failed_ends_the_run_before_the_next_save(tmp_path, monkeypatch):
    """Fails if a run goes on for hours without a checkpoint to resume from."""
    trainer = small_run.make_trainer(
        tmp_path, "num_steps=60", "checkpoint.every_steps=20", num_devices=1
    )
    monkeypatch.setattr(writer, "_write", fail)
    with pytest.raises(CheckpointError) as error:
        trainer.fit()
    assert str(error.value) == (
        f"checkpoint.step=20 could not be written to {tmp_path}/checkpoints (OSError: "
        "[Errno 28] No space left on device); free disk space or repair the file "
        "system, and "
        "run again: there is none before it"
    )
    assert 20 <= trainer.step < 40


def test_a_save_for_which_nobody_waited_is_told_at_the_end(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(writer, "_write", fail)
    values = {"w": np.arange(8, dtype=np.float32)}
    rows = states.make_rows(values)
    store = Store(str(tmp_path))
    store.save(1, states.place(values, rows), rows, extra={})
    writer._finish_at_exit()
    assert [record.getMessage() for record in caplog.records] == [
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
    values = {"w": np.arange(8, dtype=np.float32)}
    rows = states.make_rows(values)
    for _ in range(2):
        store = Store(str(tmp_path))
        store.save(1, states.place(values, rows), rows, extra={})
        with pytest.raises(CheckpointError):
            store.close()
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
