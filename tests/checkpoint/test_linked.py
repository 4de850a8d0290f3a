"""Arrays on disks: a checkpoint links their files, and reads each before it commits."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest

from tests.checkpoint import states
from tests.storage.conftest import make_row
from zjax.checkpoint import sums
from zjax.checkpoint.store import Store
from zjax.checkpoint.verify import inspect_steps
from zjax.errors import CheckpointError, StorageError
from zjax.storage.array import DiskArray

NAME = "../x\n/" + 300 * "y"
"""No path may be made of it."""


@pytest.fixture
def disk(tmp_path):
    (tmp_path / "disk").mkdir()
    return str(tmp_path / "disk")


def make_state(disk):
    row = make_row([disk])
    x = np.random.default_rng(0).normal(size=row.shape).astype(np.float32)
    array = DiskArray.write(jax.device_put(x, row.stored), row).block_until_ready()
    step = {"step": np.int32(3)}
    rows = states.make_rows(step)
    return states.place(step, rows) | {NAME: array}, rows | {NAME: row}, x


def chunks_of(path):
    return sorted(p for p in pathlib.Path(path).rglob("c/*/*") if p.is_file())


def flip(path):
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_chunks_that_are_damaged_are_not_committed(disk, tmp_path, is_frozen):
    """Fails if chunks get their second name without being read.

    The search for numbers that are not finite reads trained arrays before.
    """
    state, rows, _ = make_state(disk)
    rows[NAME] = dataclasses.replace(rows[NAME], is_frozen=is_frozen)
    store = Store(str(tmp_path / "checkpoints"))
    store.save(1, state, rows, extra={})
    store.wait()
    flip(chunks_of(state[NAME].path)[-1])  # under both names
    with pytest.raises(CheckpointError if is_frozen else StorageError) as error:
        store.save(2, state, rows, extra={})
        store.wait()
    start, _, end = str(error.value).partition(" (")
    assert start == (
        f"checkpoint.step=2 could not be written to {tmp_path / 'checkpoints'}"
        if is_frozen
        else f"zero.offload.nvme_paths={state[NAME].path!r} holds {rows[NAME].path} "
        "and "
        "cannot be written or read"
    )
    assert "does not match its checksum" in end
    assert store.steps() == (1,)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["1"]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_file_of_several_steps_is_read_once_and_told_of_each(
    disk, tmp_path, monkeypatch, is_damaged
):
    """Fails if a step is called sound as another was read, or each is read anew."""
    state, rows, _ = make_state(disk)
    store = Store(str(tmp_path / "checkpoints"), keep_last=3)
    for step in (1, 2, 3):
        store.save(step, state, rows, extra={})
    store.close()
    linked = [chunks_of(tmp_path / f"checkpoints/{n}/linked") for n in (1, 2, 3)]
    assert all(first.samefile(last) for first, *_, last in zip(*linked, strict=True))
    if is_damaged:
        flip(linked[0][-1])
    read, check_file = [], sums.check_file
    monkeypatch.setattr(sums, "check_file", lambda x: read.append(x) or check_file(x))
    verdicts = inspect_steps(str(tmp_path))
    assert sorted(read) == [str(path) for path in linked[0]]
    name = linked[0][-1].relative_to(tmp_path / "checkpoints/1")
    damaged = f"damaged: {name} does not match its checksum"
    told = [(verdict.path.name, verdict.problem) for verdict in verdicts]
    assert told == [(n, damaged if is_damaged else "intact") for n in "123"]


@pytest.mark.parametrize("damage", ["flip", "swap"])
def test_chunks_that_are_damaged_later_are_not_restored(disk, tmp_path, damage):
    state, rows, x = make_state(disk)
    store = Store(str(tmp_path / "checkpoints"))
    store.save(1, state, rows, extra={})
    store.close()
    np.testing.assert_array_equal(np.asarray(store.restore(rows)[0][NAME]), x)
    first, second, *_ = chunks_of(tmp_path / "checkpoints/1/linked")
    if damage == "flip":
        flip(first)
    else:
        one, other = first.read_bytes(), second.read_bytes()
        first.write_bytes(other)
        second.write_bytes(one)
    with pytest.raises(CheckpointError, match=r"checkpoint\.step=1 cannot be read"):
        jax.block_until_ready(Store(str(tmp_path / "checkpoints")).restore(rows)[0])
    (verdict,) = inspect_steps(str(tmp_path / "checkpoints"))
    assert verdict.problem.startswith("damaged: linked/0/c/")
