"""What the stages of a pipeline saved goes on on other stages, and on none."""

import shutil

import numpy as np
import pytest

from tests.support import small_run

SETTINGS = (
    "model.num_layers=3",
    "model.dropout_rate=0",
    "num_microbatches=4",
    "optimizer.schedule=constant",
    "optimizer.ema_decay=0.9",
)
STAGES = ("mesh.pipeline=2", "mesh.data=4")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two steps on two stages, of which the last one is filled up with a layer."""
    directory = tmp_path_factory.mktemp("saved")
    small_run.fit(directory, *SETTINGS, *STAGES, "num_steps=2")
    return directory


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Four steps on one device."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    four = "num_steps=4", small_run.EVALUATED
    trainer = small_run.fit(directory, *SETTINGS, *four, num_devices=1)
    return small_run.losses(directory), trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize(
    ("mesh", "num_devices"),
    [
        (("mesh.pipeline=3", "mesh.data=1", "mesh.tensor=2"), 6),
        pytest.param(("mesh.data=1",), 1, marks=pytest.mark.slow),
    ],
    ids=["other-stages", "one-device"],
)
def test_losses_go_on(saved, uninterrupted, tmp_path, mesh, num_devices):
    """Fails if layers are saved in the order of devices, or those that only fill up
    stages are; the loss of the evaluation is that of averaged weights."""
    directory = tmp_path / "run"
    shutil.copytree(saved, directory)
    more = ("num_steps=4", "checkpoint.resume=required", small_run.EVALUATED)
    trainer = small_run.fit(directory, *SETTINGS, *mesh, *more, num_devices=num_devices)
    losses, evaluated = uninterrupted
    found = small_run.losses(directory)
    assert sorted(found) == [1, 2, 3, 4]
    np.testing.assert_allclose(
        [found[step] for step in losses], list(losses.values()), rtol=1e-5
    )
    np.testing.assert_allclose(trainer.evaluate()["eval_loss"], evaluated, rtol=1e-5)
