"""State and parameters that rest on disks."""

import collections
import contextlib
import dataclasses
import errno
import math
import os
import pathlib
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import zjax
from tests.support import programs, small_run
from tests.support.disks import block_bytes, rows_on_disk
from tests.support.offload import (
    GPT,
    in_memory,
    make_batch,
    make_config,
    start,
    train,
)
from tests.support.trees import assert_close, stacked
from zjax.errors import StorageError
from zjax.estimate import tables
from zjax.offload import stream as streams
from zjax.replicas.state import saved_rows, saved_state
from zjax.sharding import describe, memory
from zjax.storage import files as chunks
from zjax.storage.array import DiskArray
from zjax.train.compute_params import high_bits


def on_disk(path, stage=2, *, zero=None, **changes):
    disks = tuple(str(path / name) for name in ("a", "b"))
    for disk in disks:
        os.makedirs(disk, exist_ok=True)
    return make_config(
        "nvme", stage, zero={"nvme_paths": disks} | (zero or {}), **changes
    )


def disk_bytes(path):
    found = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # it goes at this moment
                found += os.path.getsize(os.path.join(folder, name))
    return found


def test_state_rests_on_disks(tmp_path):
    """Fails if `nvme` keeps arrays in memory, or a step leaves old files behind."""
    run = start(on_disk(tmp_path, zero={"parameter_memory": "nvme"}))
    state, _ = train(run, 2)
    kept = (state.master, state.opt_state, state.params["blocks"])
    kinds = collections.Counter(
        type(x).__name__ for x in jax.tree.leaves(kept) if x.nbytes >= 8 * 64
    )
    assert [*kinds] == ["DiskArray"]
    arrays = [x for x in jax.tree.leaves(state) if isinstance(x, DiskArray)]
    for x in arrays:
        x.block_until_ready()
    numbers = sum(x.nbytes for x in arrays)
    rows = jax.tree.leaves(run.step.executor.state_plan)
    assert numbers == sum(
        math.prod(row.stored_shape) * row.dtype.itemsize for row in rows if row.disks
    )
    most, end = numbers + len(arrays) * 8 * 1000, time.monotonic() + 300
    while disk_bytes(tmp_path) >= most and time.monotonic() < end:
        time.sleep(0.1)  # files of the last step go in the background
    assert numbers < disk_bytes(tmp_path) < most


def test_steps_take_no_more_of_the_disks_than_the_state(tmp_path, monkeypatch):
    """Fails if old files stay beside the new ones."""
    run = start(on_disk(tmp_path), devices=jax.devices()[:1])
    asked = sum(map(chunks.disk_bytes, rows_on_disk(run)))
    write, found = os.pwritev, []

    def watched(*args):
        done = write(*args)
        found.append(block_bytes(*tmp_path.glob("*/zjax-*/*")))
        return done

    monkeypatch.setattr(os, "pwritev", watched)
    train(run, 3)
    assert 0.8 * asked < max(found) <= asked


def test_a_state_that_was_given_up_is_not_saved(tmp_path):
    """Fails if a checkpoint without arrays counts as one."""
    run = start(on_disk(tmp_path / "disks"))
    before = jax.tree.map(
        lambda x: x if isinstance(x, DiskArray) else x.copy(), run.state
    )
    run.step(run.state, make_batch(0))
    with pytest.raises(zjax.StateError, match="was passed to a step"):
        saved_state(before, run.plan)
    store = zjax.checkpoint.store.Store(str(tmp_path / "run"))
    saved = dataclasses.replace(before, params=high_bits(before.params, run.plan))
    with pytest.raises(zjax.CheckpointError, match="has been deleted"):
        store.save(1, saved, saved_rows(run.plan, run.config), extra={})
    assert store.steps() == ()
    store.close()


def test_reading_ahead_is_bounded(tmp_path, monkeypatch):
    """Fails if all of the state is read into host memory, or nothing ahead of use."""
    config = on_disk(tmp_path, model=dataclasses.replace(GPT, num_layers=6))
    run = start(config)
    step = run.step.executor.step
    total = memory.stored_bytes(run.plan).disks
    monkeypatch.setattr(streams, "READ_AHEAD_BYTES", total // 3)
    monkeypatch.setattr(step.stream, "limit", total // 6)
    ahead, fill = [], step.stream.fill

    def watched():
        fill()
        ahead.append(
            sum(load.disk_bytes for load in step.stream.waiting if any_coming(load))
        )

    monkeypatch.setattr(step.stream, "fill", watched)
    train(run, 1)
    assert 0 < max(ahead) <= total // 3


def any_coming(load):
    return any(isinstance(x, DiskArray) and x._coming for x in load.arrays)


def test_checkpoints_link_what_rests_on_disks(tmp_path):
    """Fails if a checkpoint copies the files, loses them with the run, or keeps those
    of steps that are gone."""
    run = start(on_disk(tmp_path / "disks"))
    store = zjax.checkpoint.store.Store(str(tmp_path / "run"), keep_last=1)
    state = run.state
    for number in range(3):
        state, _ = run.step(state, make_batch(number))
        saved = saved_state(state, run.plan)
        store.save(number + 1, saved, saved_rows(run.plan, run.config), extra={})
        store.wait()
    held = [x for x in jax.tree.leaves(state) if isinstance(x, DiskArray)]
    folder = tmp_path / "run"
    linked = (p for p in (folder / "3" / "linked").rglob("*") if p.is_file())
    links = {file.stat().st_ino for file in linked}
    assert links
    files = (p for x in held for p in pathlib.Path(x.path).rglob("*"))
    assert links <= {file.stat().st_ino for file in files}
    store.close()
    assert [p.name for p in folder.iterdir()] == ["3"]
    expected, _ = run.step(state, make_batch(9))
    other = start(make_config("device"))
    rows = saved_rows(other.plan, other.config)
    found, _ = store.restore(rows)
    found, _ = other.step(found, make_batch(9))
    assert_close(
        found.master,
        stacked(in_memory(expected.master)),
        rtol=1e-4,
        atol=2e-6,
    )


def test_a_step_writes_over_files_but_not_over_checkpoints(tmp_path):
    """Fails if a step makes new files, or if a checkpoint follows later steps."""
    run = start(on_disk(tmp_path / "disks"))
    stream = run.step.executor.step.stream
    stream.limit = memory.stored_bytes(run.plan).disks // 6  # part by part
    store = zjax.checkpoint.store.Store(str(tmp_path / "run"), keep_last=2)
    rows, state, numbers = saved_rows(run.plan, run.config), run.state, []
    for number in (1, 2):
        state, _ = run.step(state, make_batch(number))
        saved = saved_state(state, run.plan)
        store.save(number, saved, rows, extra={})
        store.wait()
        numbers.append(in_memory(saved.master))
    state, _ = run.step(state, make_batch(3))  # from here on no file has two names
    before = inodes_of(state)
    state, _ = run.step(state, make_batch(4))
    assert inodes_of(state) == before
    store.close()
    for step, expected in zip((1, 2), numbers, strict=True):
        found = in_memory(store.restore(rows, step)[0].master)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    leaves = zip(*map(jax.tree.leaves, numbers), strict=True)
    assert any((x != y).any() for x, y in leaves)


def inodes_of(state):
    held = [x for x in jax.tree.leaves(state) if isinstance(x, DiskArray)]
    paths = (pathlib.Path(x.block_until_ready().path) for x in held)
    return {file.stat().st_ino for path in paths for file in path.rglob("*")}


SETTINGS = (
    "zero.offload=nvme",
    "zero.offload.parameter_memory=pinned_host",
    "model.remat=full",
    "model.num_layers=2",
    "model.embed_size=128",
    "model.mlp_size=8192",
    "checkpoint.every_steps=3",
    "num_steps=8",
)


SMALL = ("model.embed_size=16", "model.mlp_size=64", "model.num_layers=1")


KILLS = [(4, 2), (4, *[1, 2] * 9, 3)]
"""Steps that a run takes until it is killed."""


@pytest.mark.slow
@pytest.mark.parametrize("kills", KILLS, ids=["twice", "twenty times"])
def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path, kills):
    """Fails if what is on disks after a kill is taken for a state."""
    disk = tmp_path / "disk"
    disk.mkdir()
    settings = (*SETTINGS, f"zero.offload.nvme_paths=('{disk}',)")

    def run(directory, *, num_steps=0):
        metrics = directory / "metrics.jsonl"

        def count():
            return metrics.read_text().count('"loss"') if metrics.exists() else 0

        start = count()
        command = [sys.executable, "-m", "tests.support.small_run", str(directory), "8"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with programs.started([*command, *settings], **pipes) as process:
            while num_steps and process.poll() is None:
                if count() - start >= num_steps:
                    process.kill()
                time.sleep(0.005)  # leaves the processor to the run
            output, _ = process.communicate()
        assert num_steps or process.returncode == 0, output[-2000:]
        return small_run.losses(directory)

    expected = run(tmp_path / "whole")
    for num_steps in kills:
        run(tmp_path / "killed", num_steps=num_steps)
    found = run(tmp_path / "killed")
    assert list(disk.iterdir()) == []
    assert found == pytest.approx(expected, rel=1e-6)
    assert zjax.checkpoint.store.Store(
        str(tmp_path / "killed" / "checkpoints")
    ).latest()


def test_a_disk_that_fills_up_in_a_step(tmp_path, monkeypatch):
    """Fails if the run goes on, or its checkpoint is lost."""
    disk = tmp_path / "disk"
    disk.mkdir()
    settings = (
        *SETTINGS,
        *SMALL,
        "num_steps=5",
        f"zero.offload.nvme_paths=('{disk}',)",
    )
    small_run.fit(tmp_path / "whole", *settings, num_devices=1)
    trainer = small_run.make_trainer(tmp_path / "full", *settings, num_devices=1)
    write = os.pwritev

    def until_full(*args):
        if trainer.step >= 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*args)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", until_full)
        with pytest.raises(StorageError, match=r"holds .*No space left on device"):
            trainer.fit()
    trainer.close()
    resumed = small_run.make_trainer(tmp_path / "full", *settings, num_devices=1)
    assert resumed.step == 3
    resumed.fit()
    resumed.close()
    assert small_run.losses(tmp_path / "full") == pytest.approx(
        small_run.losses(tmp_path / "whole"), rel=1e-6
    )


FEW = ("model.num_layers=1", "model.mlp_size=1024")
FILLS_UP = """
import errno, os, sys
from tests.support import small_run
trainer = small_run.make_trainer(*sys.argv[1:], num_devices=1)
write, left = os.pwritev, [5]
def until_full(*args):
    left[0] -= 1
    if left[0] < 0:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return write(*args)
os.pwritev = until_full
trainer.fit()
"""


def test_a_run_for_which_there_is_no_room_leaves_nothing(tmp_path):
    """Fails if files of a step that failed stay on the disk."""
    disk = tmp_path / "disk"
    disk.mkdir()
    settings = (*SETTINGS, *FEW, "num_steps=2", f"zero.offload.nvme_paths=('{disk}',)")
    command = [sys.executable, "-c", FILLS_UP, str(tmp_path / "full"), *settings]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode
    assert "No space left on device" in ended.stderr
    assert '"loss"' not in (tmp_path / "full" / "metrics.jsonl").read_text()
    assert list(disk.iterdir()) == []


def test_disks_that_cannot_hold_the_state(tmp_path, monkeypatch):
    monkeypatch.setattr(zjax.storage.scratch, "free_bytes", lambda paths: 1000)
    with pytest.raises(
        StorageError, match=r"have 1\.00 kB free for 4\.17 MB of files; make room"
    ):
        start(on_disk(tmp_path))


def test_plan_tells_what_rests_on_disks(tmp_path):
    run = start(on_disk(tmp_path, zero={"parameter_memory": "pinned_host"}))
    plan, text = run.plan, tables.describe_memories(run.plan, run.config)
    moved = describe.format_bytes(memory.stored_bytes(plan).disks)
    assert text.count(moved) == 3  # rests, up and down
    assert [m for m in ("device", "pinned_host", "nvme") if m in text] == [
        "device",
        "pinned_host",
        "nvme",
    ]
