"""How the first state comes to where it rests."""

import importlib

import jax
import numpy as np
import optax
import pytest

import zjax
from tests.support.disks import rows_on_disk
from tests.support.offload import (
    GPT,
    LLAMA,
    Perceptron,
    make_config,
    memories,
    start,
)
from tests.support.trees import stacked
from zjax.sharding import memory
from zjax.storage.array import DiskArray


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["GPT", "LLAMA"])
def test_a_state_started_layer_by_layer_is_the_state(model):
    """Fails if a layer starts from another's random numbers, or is not moved."""
    changes = {"model": model, "optimizer": {"ema_decay": 0.5}}
    expected = start(make_config("device", **changes), weights=()).state
    found = start(make_config("pinned_host", **changes), weights=()).state
    for part in ("master", "opt_state", "ema", "step", "scaler"):
        jax.tree.map(
            np.testing.assert_array_equal,
            stacked(getattr(found, part)),
            getattr(expected, part),
        )
    assert memories((found.master, found.opt_state)) == {"pinned_host"}


def test_a_users_model_goes_to_disks_in_turn(tmp_path, monkeypatch):
    """Fails if all of it is pinned at once, where a little would do."""
    monkeypatch.setattr("zjax.replicas.state.transfer_budget", lambda mesh: 0)
    events = []
    for name in ("write", "block_until_ready"):
        noted = noting(events, name, getattr(DiskArray, name))
        monkeypatch.setattr(DiskArray, name, noted)
    zero = {"offload": {"kind": "nvme", "nvme_paths": (str(tmp_path),)}}
    run = zjax.initialize(
        Perceptron(),
        optax.adam(1e-2),
        lambda model, batch, _: model(batch["x"]).mean(),
        {"x": np.ones((8, 24), np.float32)},
        {"zero": zero | {"min_shard_elements": 0}},
    )
    number = len(rows_on_disk(run))
    assert number > 2
    assert events[: 2 * number] == ["write", "block_until_ready"] * number


def test_a_run_asks_for_what_its_devices_pin(monkeypatch):
    """Fails if the bytes are those of one device, or of what rests on them."""
    asked = []
    module = importlib.import_module("zjax.run.build")
    monkeypatch.setattr(module, "warn_of_small_pages", lambda *args: asked.append(args))
    run = start(make_config("pinned_host"))
    pinned = memory.stored_bytes(run.plan).host
    assert asked == [(len(run.mesh.local_devices) * pinned, "cpu")]
    assert pinned > 0


def noting(events, name, act):
    def noted(*args):
        events.append(name)
        return act(*args)

    return noted
