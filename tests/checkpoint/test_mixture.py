"""A run with experts goes on from its checkpoint, on other devices."""

import numpy as np

from tests.support import small_run

SETTINGS = (
    "model.num_layers=2",
    "model.dropout_rate=0",
    "model.moe.num_experts=(2,4)",
    "model.moe.balance_scope=sequence",
    "optimizer.schedule=constant",
    "checkpoint.every_steps=0",
)


def test_losses_go_on(tmp_path):
    """Fails if layers of another kind are saved under one name."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    small_run.fit(whole, *SETTINGS, "num_steps=4", num_devices=1)
    small_run.fit(parts, *SETTINGS, "num_steps=2", num_devices=2)
    more = ("num_steps=4", "checkpoint.resume=required")
    trainer = small_run.fit(parts, *SETTINGS, *more, num_devices=1)
    assert trainer.state.master["blocks"].keys() == {"segment0", "segment1"}
    expected, found = small_run.losses(whole), small_run.losses(parts)
    assert sorted(found) == [1, 2, 3, 4]
    losses = [[each[step] for step in expected] for each in (found, expected)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
