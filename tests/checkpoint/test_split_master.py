"""Halves of master weights in checkpoints, and what only looks like them."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from zjax.checkpoint import arrays
from zjax.checkpoint.layers import joined_entries
from zjax.checkpoint.layout import Entry
from zjax.checkpoint.store import Store
from zjax.sharding.placement import ArrayPlan

LOWER, UPPER = Entry((3,), "int16"), Entry((3,), "bfloat16")


def make_row(name, dtype="float32"):
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    place = NamedSharding(mesh, PartitionSpec())
    return ArrayPlan(name, (3,), jnp.dtype(dtype), place, place)


def test_a_tree_of_your_own_may_have_params(tmp_path):
    """Fails if all that is called so counts as a half of master weights."""
    rows = {"params": {"w": make_row("w")}, "opt": {"m": make_row("m")}}
    state = jax.tree.map(
        lambda row: jax.device_put(np.arange(3, dtype=np.float32), row.stored), rows
    )
    store = Store(str(tmp_path))
    store.save(1, state, rows, extra={})
    store.wait()
    assert sorted(store.entries()) == ["opt/m", "params/w"]
    found, _ = store.restore(rows)
    jax.tree.map(np.testing.assert_array_equal, found, state)


@pytest.mark.parametrize(
    "other",
    [
        {"master/w": LOWER},
        {"master/w": LOWER, "params/w": Entry((4,), "bfloat16")},
        {"master/w": Entry((3,), "float32"), "params/w": UPPER},
        {"master/w": LOWER, "params/v": UPPER},
    ],
    ids=["no upper half", "another shape", "whole weights", "another name"],
)
def test_other_arrays_are_unchanged(other):
    """Fails if a file that lacks a half restores as if it had both."""
    assert joined_entries(other) == other
    assert list(joined_entries({"master/w": LOWER, "params/w": UPPER})) == ["master/w"]


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_memory_is_pinned_for_the_copies_that_are_taken(monkeypatch, memory):
    """Fails if parameters are pinned in the pool that the low bits fill."""
    rows = [make_row("upper"), make_row("lower", "int16").stored_in(memory)]
    pinned = []
    gpu = types.SimpleNamespace(platform="gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    monkeypatch.setattr(jax, "device_put", lambda x, place: pinned.append(x.dtype))
    monkeypatch.setattr(arrays, "SingleDeviceSharding", lambda device, **kind: device)
    arrays.pin(rows)
    assert len(pinned) == (2 if memory == "device" else 0)
