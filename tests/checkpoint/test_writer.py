"""A save that fails is told soon, whoever waits for it."""

import numpy as np
import pytest

from tests.checkpoint import states
from tests.support import small_run
from zjax.checkpoint import writer
from zjax.checkpoint.store import Store
from zjax.errors import CheckpointError


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
        "[Errno 28] No space left on device); make room or mend the file system, and "
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
        "a checkpoint is lost, for which nobody waited: [Errno 28] No space left on "
        "device"
    ]
    with pytest.raises(CheckpointError):
        store.close()
