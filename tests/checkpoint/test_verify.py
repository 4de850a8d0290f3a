"""Processes share the reading, and all say the same of it."""

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from zjax.checkpoint import sums, verify


@pytest.fixture
def step(tmp_path):
    for number in range(6):
        (tmp_path / f"file{number}").write_bytes(bytes(range(100 + number)))
    known = sums.sum_files(tmp_path, sums.list_files(tmp_path))
    sums.write_sums(tmp_path / "sums", known)
    return tmp_path


def as_process(monkeypatch, process, others):
    """One of two, of which the other has found `others`."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: process)
    seen = []

    def gather(x):
        seen.append(int(x))
        return np.asarray([x, others])

    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    return seen


@pytest.mark.parametrize("process", [0, 1])
def test_all_processes_name_the_file_that_one_has_found(step, monkeypatch, process):
    """Fails if the others go on, and wait for it in the next program."""
    (step / "file4").write_bytes(bytes(104))
    seen = as_process(monkeypatch, process, others=4 if process else 6)
    reads = "file4" in sums.partition(sums.read_sums(step / "sums"), process, 2)
    if not reads:
        seen = as_process(monkeypatch, process, others=4)
    with pytest.raises(ValueError, match="file4 does not match its checksum"):
        verify.check_step(step, shared=True)
    assert seen == [4 if reads else 6]


def test_each_file_is_read_by_one_process(step, monkeypatch):
    read = []
    monkeypatch.setattr(
        sums, "find_damage", lambda *_, names, **__: read.extend(names) or []
    )
    for process in (0, 1):
        as_process(monkeypatch, process, others=6)
        verify.check_step(step, shared=True)
        assert len(read) == 3 * (process + 1)
    assert sorted(read) == [f"file{number}" for number in range(6)]


def test_who_is_alone_reads_all(step, monkeypatch):
    (step / "file5").write_bytes(bytes(105))
    as_process(monkeypatch, 0, others=6)
    for name in ("file5", "nowhere"):
        with pytest.raises(ValueError, match=name):
            verify.check_file_of(step, name)
    with pytest.raises(ValueError, match="file5 does not match its checksum"):
        verify.check_step(step, shared=False)


def test_checksums_that_one_process_cannot_read_are_told_in_all(step, monkeypatch):
    """Fails if the others wait for it in their next program."""
    as_process(monkeypatch, 0, others=-1)
    with pytest.raises(ValueError, match=r"^sums cannot be read by another process$"):
        verify.check_step(step, shared=True)
    (step / "sums").unlink()
    seen = as_process(monkeypatch, 1, others=6)
    with pytest.raises(FileNotFoundError):
        verify.check_step(step, shared=True)
    assert seen == [-1]
