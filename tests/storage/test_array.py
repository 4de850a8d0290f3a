"""Arrays on disks come back, or say what is wrong."""

import errno
import gc
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
import pytest

from tests.storage.conftest import CHUNK_BYTES, SPECS, make_row
from tests.support import programs
from tests.support.refusals import storage_error
from zjax.errors import StorageError
from zjax.storage import scratch
from zjax.storage.array import DiskArray


def make_array(row):
    x = np.random.default_rng(0).normal(size=row.shape) * 50
    x[:4] = 0
    return jax.device_put(x.astype(row.dtype), row.stored)


def files(path):
    return [p for p in pathlib.Path(path).rglob("*") if p.is_file()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint8"])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.usefixtures("small_chunks")
def test_comes_back_as_it_was(disks, spec, dtype):
    row = make_row(disks, SPECS[spec], dtype)
    x = make_array(row)
    array = DiskArray.write(x, row)
    found = array.to_devices()
    np.testing.assert_array_equal(found, x)
    assert (found.sharding, found.dtype) == (x.sharding, x.dtype)
    np.testing.assert_array_equal(array.read((slice(3, 7), slice(1))), x[3:7, :1])
    assert len(files(array.path)) > x.nbytes / CHUNK_BYTES
    array.prefetch()
    np.testing.assert_array_equal(array.to_devices(), x)


def test_disks_take_turns(disks):
    """Fails if a disk is named and not used."""
    row = make_row(disks)
    written = [DiskArray.write(make_array(row), row) for _ in range(4)]
    for array in written:
        array.block_until_ready()
    assert [len(files(disk)) > 0 for disk in disks] == [True, True]
    held = [sum(a.path.startswith(disk) for a in written) for disk in disks]
    assert held == [2, 2]


@pytest.mark.usefixtures("only_new_garbage")
def test_files_go_when_an_array_does(disks):
    row = make_row(disks)
    array = DiskArray.write(make_array(row), row)
    array.to_devices()
    array.delete()
    assert array.is_deleted()
    another = DiskArray.write(make_array(row), row).block_until_ready()
    assert another.path == array.path
    spare = DiskArray.write(make_array(row), row).block_until_ready()
    spare.delete()
    del another
    gc.collect()
    assert gone(array.path)
    assert gone(spare.path)  # with the last that is held


def gone(path):
    """Waits until a thread has removed the file; gives up after five minutes."""
    end = time.monotonic() + 300
    while pathlib.Path(path).exists() and time.monotonic() < end:
        time.sleep(0.01)
    return not pathlib.Path(path).exists()


@pytest.mark.usefixtures("only_new_garbage")
def test_files_go_with_the_last_who_holds_an_array(disks):
    """Fails if a state that is dropped, as after a failed step, stays on the disks."""
    row = make_row(disks)
    array = DiskArray.write(make_array(row), row)
    path = array.block_until_ready().path
    assert pathlib.Path(path).exists()
    del array
    gc.collect()
    assert gone(path)


@pytest.mark.parametrize("use", ["to_devices", "prefetch", "read", "block_until_ready"])
def test_what_was_given_up_cannot_be_used(disks, use):
    """Fails if it reads as a fault of the disk, or as nothing."""
    row = make_row(disks)
    array = DiskArray.write(make_array(row), row)
    array.delete()
    with pytest.raises(RuntimeError, match="has been deleted with shape=\\(16, 12\\)"):
        getattr(array, use)()


def test_paths_may_be_relative(tmp_path, monkeypatch):
    """Fails if files are looked for elsewhere once the directory changes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "disk").mkdir()
    row = make_row(["disk"])
    array = DiskArray.write(make_array(row), row)
    monkeypatch.chdir("/")
    for found in (array.to_devices(), np.asarray(array)):
        np.testing.assert_array_equal(found, make_array(row))


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_is_noticed(disks, damage):
    """Fails if what is read need not be what was written."""
    row = make_row(disks)
    array = DiskArray.write(make_array(row), row).block_until_ready()
    chunk = next(p for p in files(array.path) if p.suffix != ".json")
    content = bytearray(chunk.read_bytes())
    content[5] ^= 1
    if damage == "remove":
        chunk.unlink()
    else:
        chunk.write_bytes(content[:-8] if damage == "truncate" else content)
    with pytest.raises(StorageError) as error:
        array.to_devices()
    text = str(error.value)
    assert text.startswith(
        f"zero.offload.nvme_paths='{array.path}' holds blocks/x and cannot be written "
        "or read ("
    )
    assert text.endswith(
        "; make room or mend the disk; the run resumes from its last sound checkpoint"
    )


def test_a_disk_that_fails_is_told(disks, monkeypatch):
    row = make_row(disks)

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwritev", fail)
    array = DiskArray.write(make_array(row), row)
    with pytest.raises(StorageError, match=r"holds blocks/x .*Input/output error"):
        array.block_until_ready()


def test_paths_that_are_no_directories(disks, tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(StorageError) as error:
        scratch.Scratch((disks[0], str(file), "/nowhere"))
    remedy = "name directories on the disks of this host, in which files can be written"
    assert str(error.value) == (
        f"zero.offload.nvme_paths='{file}' is not a directory to write to; {remedy}\n"
        f"zero.offload.nvme_paths='/nowhere' is not a directory to write to; {remedy}"
    )


@pytest.mark.parametrize("call", ["mkdtemp", "write_file"])
def test_a_disk_that_is_full_from_the_start(tmp_path, monkeypatch, call):
    """Fails if the disk's error reaches the user as it is."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile if call == "mkdtemp" else scratch, call, full)
    with storage_error(
        f"zero.offload.nvme_paths='{tmp_path}' takes no files (No space left on "
        "device); make room or mend the disk, or name another"
    ):
        scratch.check_disks((str(tmp_path),), [10**9])


def test_paths_in_the_memory_of_the_host(disks, monkeypatch, tmp_path):
    """Fails if what is to leave the host's memory goes there."""
    mounts = tmp_path / "mounts"
    lines = [("/", "ext4"), (disks[1], "tmpfs"), (f"{disks[0]}x", "tmpfs")]
    mounts.write_text(
        "".join(f"1 2 3:4 / {point} rw - {kind} none rw\n" for point, kind in lines)
    )
    monkeypatch.setattr(scratch, "_MOUNTS", mounts)
    with storage_error(
        f"zero.offload.nvme_paths='{disks[1]}' lies in the memory of this host; name "
        "directories on disks: zero.offload=pinned_host is faster"
    ):
        scratch.Scratch(disks)


def test_disks_that_are_too_slow(disks, monkeypatch):
    """Fails if a state is placed on a disk that no step can wait for."""
    rates = {"first": 3e9, "second": 0.02e9}
    monkeypatch.setattr(scratch, "free_bytes", lambda paths: 10**12)
    scratch.check_disks(disks, [10**9])
    assert [files(disk) for disk in disks] == [
        [pathlib.Path(place) / "lock"] for place in scratch.open_scratch(disks).places
    ]
    monkeypatch.setattr(
        scratch, "_write_rate", lambda place: rates[pathlib.Path(place).parent.name]
    )
    with storage_error(
        f"zero.offload.nvme_paths='{disks[1]}' writes 0.020 GB/s, so that the 80 GB of "
        "a step take 0.6 hours; name a faster disk, or more of them"
    ):
        scratch.check_disks(disks, 80 * [10**9])


def test_disks_that_are_too_small(disks, monkeypatch):
    """Fails if the sizes of single arrays are forgotten: only one disk has the last."""
    monkeypatch.setattr(scratch, "free_bytes", lambda paths: 5 * 10**9)
    scratch.check_disks(disks[:1], 5 * [10**9])
    scratch.check_disks(disks, 4 * [10**9])
    with pytest.raises(StorageError, match=r"5\.00 GB free for 6\.00 GB of"):
        scratch.check_disks(disks[:1], 3 * [10**9], num_processes=2)
    with storage_error(
        f"zero.offload.nvme_paths={disks!r} have 5.00 GB free for 6.00 GB of files; "
        "make room, name more disks, or use more hosts"
    ):
        scratch.check_disks(disks, 5 * [10**9])


def test_arrays_of_any_order_are_spread_over_disks(disks):
    """Fails if arrays that are large come to lie on one disk, as in turns they would,
    or if what is gone still counts."""
    opened, sizes = scratch.Scratch(disks), (9, 1) * 8
    first, second = opened.places
    paths = [opened.take(size, size) for size in sizes]
    held = dict.fromkeys(opened.places, 0)
    for path, size in zip(paths, sizes, strict=True):
        held[os.path.dirname(path)] += size
    assert max(held.values()) <= sum(sizes) / 2 + max(sizes)
    on_first = [path for path in paths if path.startswith(f"{first}/")]
    for path in on_first:
        opened.give_back(path)
    opened.clear()
    new = [opened.take("other", 1) for _ in range(held[second])]
    assert {os.path.dirname(path) for path in new} == {first}


def test_files_of_an_array_that_is_gone_are_written_over(disks):
    """Fails if a step makes new files, or takes those of an array that is held, or of
    another kind."""
    row, other = make_row(disks), make_row(disks, shape=(40, 64))
    held = DiskArray.write(make_array(row), row).block_until_ready()
    content = np.asarray(held)
    gone = DiskArray.write(make_array(row), row).block_until_ready()
    gone.delete()
    files_before = inodes(disks)
    new = DiskArray.write(make_array(row) + 1, row).block_until_ready()
    assert inodes(disks) == files_before
    np.testing.assert_array_equal(np.asarray(held), content)
    np.testing.assert_array_equal(np.asarray(new), content + 1)
    new.delete()
    another = DiskArray.write(make_array(other), other).block_until_ready()
    assert inodes(disks) > files_before
    scratch.open_scratch(disks).clear()
    assert not pathlib.Path(new.path).exists()
    for kept in (held, another):
        assert np.isfinite(np.asarray(kept)).all()


def inodes(disks):
    return {path.stat().st_ino for disk in disks for path in files(disk)}


PROGRAM = """
import sys, time
from zjax.storage import scratch
print(scratch.open_scratch((sys.argv[1],)).places[0], flush=True)
time.sleep(float(sys.argv[2]))
"""


def test_a_process_leaves_nothing_and_removes_what_a_killed_one_left(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE}
    with (
        programs.started([*command, "600"], **pipes) as alive,
        programs.started([*command, "600"], **pipes) as killed,
    ):
        places = [pathlib.Path(p.stdout.readline().strip()) for p in (alive, killed)]
        assert all(place.is_dir() for place in places)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        subprocess.run([*command, "0"], check=True, capture_output=True)
        assert [place.is_dir() for place in places] == [True, False]
    subprocess.run([*command, "0"], check=True, capture_output=True)
    assert list(tmp_path.iterdir()) == []
