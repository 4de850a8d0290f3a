"""Gradients that wait on disks."""

import jax
import numpy as np
import pytest

from tests.support.offload import make_config, start, train, weights_of
from zjax.storage.array import DiskArray


@pytest.mark.parametrize(
    ("number", "delay"),
    [
        pytest.param(1, -1, id="for their norm"),
        pytest.param(2, -1, id="for the next microbatch"),
        pytest.param(1, 1, id="for the next step"),
    ],
)
def test_gradients_on_disks_are_those_that_came(tmp_path, monkeypatch, number, delay):
    """Fails if a gradient is another's, or none goes to the disk."""
    written, write = [], DiskArray.write.__func__

    def watched(kind, x, row):
        written.append(row.path)
        return write(kind, x, row)

    monkeypatch.setattr(DiskArray, "write", classmethod(watched))
    found = []
    for zero in (
        {"gradient_memory": "device"},
        {"gradient_memory": "nvme", "nvme_paths": (str(tmp_path),)},
    ):
        zero |= {"delay_updates_from": delay}
        run = start(make_config("pinned_host", num_microbatches=number, zero=zero))
        monkeypatch.setattr(run.step.executor.step.stream, "limit", 1)
        assert not written
        state, metrics = train(run, 3)
        found.append((weights_of(run.step.settle(state)), metrics))
    assert written
    jax.tree.map(np.testing.assert_array_equal, *found)
