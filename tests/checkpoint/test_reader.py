"""What is not as it was saved is not restored, and `zjax check` says what to type."""

import os
import random
import shutil
import sys

import crc32c
import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from tests.checkpoint import states
from tests.support.refusals import checkpoint_error
from zjax.checkpoint import steps, sums, verify
from zjax.checkpoint.store import Store
from zjax.cli import main
from zjax.errors import CheckpointError
from zjax.storage.files import write_file

VALUES = {"w": np.arange(96, dtype=np.float32).reshape(12, 8), "step": np.int32(3)}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Steps 1 and 2; nobody changes them."""
    return states.save(tmp_path_factory.mktemp("written"), VALUES, 1, 2).directory


@pytest.fixture
def directory(written, tmp_path):
    shutil.copytree(written, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def files_of(path):
    files = sorted(p for p in path.rglob("*") if p.is_file())
    assert len(files) >= 8
    return files


def flip(path, moment):
    content = bytearray(path.read_bytes())
    content[moment.randrange(len(content))] ^= 1 << moment.randrange(8)
    path.write_bytes(content)


def test_a_bit_that_changes_in_any_file_is_told(directory):
    """Fails if other numbers are restored, or the file is not named."""
    moment, rows = random.Random(0), states.make_rows(VALUES)
    for path in files_of(directory / "2"):
        if path.name == "sums":
            continue
        whole = path.read_bytes()
        flip(path, moment)
        name = path.relative_to(directory / "2")
        reads = (
            lambda store: store.restore(rows),
            lambda store: store.source().read_all("w"),
        )
        for read in reads:
            with checkpoint_error(
                f"checkpoint.step=2 cannot be read from {directory} (ValueError: "
                f"{name} does not match its checksum); delete {directory}/2 to go on "
                "from step 1"
            ):
                read(Store(str(directory)))
        path.write_bytes(whole)
    states.assert_same(Store(str(directory)).restore(rows)[0], VALUES, rows)


def test_a_damaged_index_is_told_without_reading_the_arrays(directory):
    path = directory / "2/index/metadata"
    path.write_bytes(path.read_bytes().replace(b'"at": 2', b'"at": 3'))
    for use in (Store.extra, Store.source, Store.best):
        with pytest.raises(CheckpointError, match="index/metadata does not match"):
            use(Store(str(directory)))


@pytest.mark.parametrize("fault", ["cut", "emptied", "removed"])
def test_a_step_that_lacks_a_file_is_not_offered(directory, fault, caplog):
    """Fails if what a power loss left is taken for a step."""
    rows = states.make_rows(VALUES)
    for path in files_of(directory / "2"):
        whole = path.read_bytes()
        path.unlink()
        if fault != "removed":
            path.write_bytes(whole[: len(whole) // 2 if fault == "cut" else 0])
        store = Store(str(directory))
        assert (store.steps(), store.latest()) == ((1,), 1), path
        with pytest.raises(CheckpointError, match="is not a checkpoint in"):
            store.restore(rows, step=2)
        path.write_bytes(whole)
    told = {record.getMessage() for record in caplog.records}
    start = f"{directory}/2 is not complete and is not used: "
    assert told and all(text.startswith(start) for text in told)
    lacks = {
        "cut": "index/metadata has ",
        "emptied": "index/metadata has 0 bytes of ",
        "removed": "index/metadata is missing (No such file or directory)",
    }
    assert any(lacks[fault] in text for text in told)
    assert Store(str(directory)).steps() == (1, 2)


def test_a_step_that_a_run_deletes_while_it_is_read_is_named(
    directory, caplog, monkeypatch
):
    """Fails if a reader takes it for damage, or offers it, or offers no other."""
    store, find_missing = Store(str(directory)), steps.find_missing

    def delete_first(path):
        if path.name == "1" and path.exists():
            steps.remove(path)
        return find_missing(path)

    def delete_second(path):
        steps.remove(directory / "2")
        return read_index(path)

    monkeypatch.setattr(steps, "find_missing", delete_first)
    assert store.steps() == (2,)
    assert caplog.messages == []
    shutil.copytree(directory / "2", directory / "3")
    read_index = steps.read_index
    monkeypatch.setattr(steps, "read_index", delete_second)
    with checkpoint_error(
        f"checkpoint.step=2 was deleted from {directory} while it was read; use one of "
        "3, or raise checkpoint.keep_last"
    ):
        store.extra(2)


def test_a_run_does_not_start_anew_beside_steps_that_lost_files(directory):
    for step in (1, 2):
        (directory / f"{step}/state/_METADATA").unlink()
    for use in (Store.latest, lambda store: store.restore(states.make_rows(VALUES))):
        with checkpoint_error(
            f"checkpoint.step=2 is not complete in {directory} (state/_METADATA is "
            "missing (No such file or directory)), nor is any other step; restore its "
            "files, or start in another directory"
        ):
            use(Store(str(directory)))


def test_an_incomplete_step_gives_way_to_the_next_save_of_it(directory):
    (directory / "2/state/_METADATA").unlink()
    store = states.save(directory, VALUES, 2)
    assert Store(str(directory)).steps() == (1, 2)
    assert store.restore(states.make_rows(VALUES))[1] == {"at": 2}
    assert sorted(path.name for path in directory.iterdir()) == ["1", "2"]


def test_steps_without_checksums_restore_with_a_warning(directory, caplog):
    """Fails if a step of an older version is refused, or taken without a word."""
    path = directory / "2/index/metadata"
    path.write_bytes(path.read_bytes().replace(b'"format": 2', b'"format": 1'))
    (directory / "2/sums").unlink()
    rows = states.make_rows(VALUES)
    store = Store(str(directory))
    for _ in range(2):
        states.assert_same(store.restore(rows)[0], VALUES, rows)
    assert caplog.messages == [
        f"{directory}/2 was saved without checksums, so damage cannot be detected; the "
        "next save has them"
    ]
    (directory / "2/state/manifest.ocdbt").write_bytes(b"")
    assert Store(str(directory)).steps() == (1,)


def test_a_step_whose_checksums_are_lost_is_not_an_old_one(directory, caplog):
    (directory / "2/sums").unlink()
    assert Store(str(directory)).latest() == 1
    (told,) = caplog.messages
    assert told.endswith("/2 is not complete and is not used: sums is missing")


def test_who_has_read_a_step_alone_comes_to_the_shared_reading(directory, monkeypatch):
    """Fails if the other processes wait for it for ever."""
    read = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(verify, "check_step", lambda _, shared: read.append(shared))
    found = verify.Reader(directory)
    for shared in (False, False, True, True, False):
        found.verify(2, shared=shared)
    assert read == [False, True]


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


@pytest.fixture
def run_directory(tmp_path):
    states.save(tmp_path / "checkpoints", VALUES, 8, 9, 10)
    return tmp_path


def check(directory, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["zjax", "check", str(directory)])
    with pytest.raises(SystemExit) as end:
        main.run()
    said = capsys.readouterr()
    return end.value.code, said.out.splitlines(), said.err


def test_sound_steps(run_directory, monkeypatch, capsys):
    for place in (run_directory, run_directory / "checkpoints"):
        status, lines, _ = check(place, monkeypatch, capsys)
        assert status == 0
        assert lines[0] == f"{run_directory}/checkpoints"
        assert lines[1].split() == ["step", "files", "bytes", "state"]
        assert [line.split()[0] for line in lines[3:6]] == ["8", "9", "10"]
        assert all(line.endswith("intact") for line in lines[3:6])
        assert lines[6:] == ["a run resumes from step 10"]


def test_damaged_and_incomplete_steps(run_directory, monkeypatch, capsys):
    """Fails if the advice is no command, or leads to a step that is not whole."""
    place = run_directory / "checkpoints"
    index = place / "9/index/metadata"
    index.write_bytes(index.read_bytes().replace(b"float32", b"float64"))
    (place / "10/state/_METADATA").unlink()
    status, lines, _ = check(run_directory, monkeypatch, capsys)
    assert status == 1
    assert lines[3].endswith("intact")
    assert lines[4].endswith("damaged: index/metadata does not match its checksum")
    assert "not complete: state/_METADATA is missing" in lines[5]
    assert lines[6:] == ["to resume from step 8:", f"rm -r {place}/9"]
    (place / "8/index/metadata").unlink()
    status, lines, _ = check(run_directory, monkeypatch, capsys)
    told = "no step can be restored: start in another directory"
    assert (status, lines[-1]) == (1, told)


def test_a_step_without_checksums_is_not_called_sound(
    run_directory, monkeypatch, capsys
):
    index = run_directory / "checkpoints/10/index/metadata"
    index.write_bytes(index.read_bytes().replace(b'"format": 2', b'"format": 1'))
    (run_directory / "checkpoints/10/sums").unlink()
    status, lines, _ = check(run_directory, monkeypatch, capsys)
    assert status == 3
    assert lines[5].endswith("unknown (no checksums)")
    assert lines[6:] == ["a run resumes from step 10"]


def test_where_there_is_nothing_to_check(tmp_path, monkeypatch, capsys):
    status, lines, error = check(tmp_path, monkeypatch, capsys)
    assert (status, lines) == (2, [])
    assert error == (
        f"zjax: checkpoint.directory='{tmp_path}' holds no complete checkpoint; give "
        "the directory that a run saved into, or start a new run\n"
    )


@pytest.mark.parametrize("size", [0, 3, 4, 5, 999, 1000, 2049])
@pytest.mark.parametrize("block", [7, 4096])
def test_files_are_read_block_by_block(tmp_path, monkeypatch, size, block):
    """Fails if bytes at the end of a block or a file do not count."""
    monkeypatch.setattr(sums, "_BLOCK_BYTES", block)
    content = bytes(np.random.default_rng(0).integers(0, 256, size, np.uint8))
    (tmp_path / "file").write_bytes(content)
    found = sums.sum_files(tmp_path, ["file"])
    head, tail = content[: max(size - 4, 0)], content[max(size - 4, 0) :]
    expected = sums.Sum(size, crc32c.crc32c(head), int.from_bytes(tail, "little"))
    assert found == {"file": expected}
    for place in range(0, size, 97):
        spoiled = bytearray(content)
        spoiled[place] ^= 1
        (tmp_path / "file").write_bytes(spoiled)
        assert sums.find_damage(tmp_path, found, names=["file"], whole_chunks=True) == [
            ("file", "file does not match its checksum")
        ]


def test_files_that_end_in_their_own_checksum_cannot_take_each_others_place(tmp_path):
    """Fails if CRC-32C of the whole file is listed, which is the same for all such."""
    for name, text in (("a", b"one node"), ("b", b"two node")):
        own = crc32c.crc32c(text).to_bytes(4, "little")
        (tmp_path / name).write_bytes(text + own)
    found = sums.sum_files(tmp_path, ["a", "b"])
    os.rename(tmp_path / "b", tmp_path / "a")
    damage = sums.find_damage(tmp_path, found, names=["a"], whole_chunks=True)
    assert damage == [("a", "a does not match its checksum")]


@pytest.mark.parametrize("whole", [False, True])
def test_chunks_are_read_whole_on_request_only(tmp_path, whole):
    """Fails if a chunk that another has replaced is taken for it."""
    name = "linked/blocks/x/c/0/1"
    (tmp_path / name).parent.mkdir(parents=True)
    content = np.arange(9000).astype(np.uint8)
    write_file(str(tmp_path / name), content)
    found = sums.sum_files(tmp_path, [name])
    assert found[name].crc == found[name].tail == crc32c.crc32c(content.tobytes())

    def damage():
        return sums.find_damage(tmp_path, found, names=[name], whole_chunks=whole)

    assert damage() == []
    spoiled = bytearray((tmp_path / name).read_bytes())
    spoiled[5000] ^= 1
    (tmp_path / name).write_bytes(spoiled)
    assert bool(damage()) == whole  # tensorstore compares what it reads
    with pytest.raises(ValueError, match="does not match its checksum"):
        sums.sum_files(tmp_path, [name])
    write_file(str(tmp_path / name), content[::-1].copy())
    assert damage() == [(name, f"{name} does not match its checksum")]


def test_the_list_is_checked_itself(tmp_path, monkeypatch):
    path, known = tmp_path / "sums", {"a b": sums.Sum(5, 1, 2), "c": sums.Sum(0, 3, 0)}
    sums.write_sums(path, known)
    assert sums.read_sums(path) == known
    whole = path.read_bytes()
    assert whole.startswith(b"0000000100000002 5 a b\n")
    for spoiled in (b"", whole[:-1], whole[:-9], whole.replace(b" 5 ", b" 6 ")):
        path.write_bytes(spoiled)
        with pytest.raises(ValueError, match="sums does not match its checksum"):
            sums.read_sums(path)
    monkeypatch.setattr(sums, "_MAX_BYTES", 10)
    path.write_bytes(bytes(11))
    with pytest.raises(ValueError, match="sums has 11 bytes"):
        sums.read_sums(path)
