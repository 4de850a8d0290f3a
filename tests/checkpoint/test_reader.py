"""What is not as it was saved is not restored, and what is not whole is not offered."""

import random
import shutil

import jax
import numpy as np
import pytest

from tests.checkpoint import states
from zjax.checkpoint import steps, verify
from zjax.checkpoint.store import Store
from zjax.errors import CheckpointError

VALUES = {"w": np.arange(96, dtype=np.float32).reshape(12, 8), "step": np.int32(3)}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Steps 1 and 2; nobody changes them."""
    directory = tmp_path_factory.mktemp("written")
    store = Store(str(directory))
    rows = states.make_rows(VALUES)
    for step in (1, 2):
        store.save(step, states.place(VALUES, rows), rows, extra={"at": step})
    store.close()
    return directory


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
            lambda store: store.restore_part(rows["w"], "w"),
            lambda store: store.read_array("w"),
        )
        for read in reads:
            with pytest.raises(CheckpointError) as error:
                read(Store(str(directory)))
            assert str(error.value) == (
                f"checkpoint.step=2 cannot be read from {directory} (ValueError: "
                f"{name} does not match its checksum); delete {directory}/2 to go on "
                "from step 1"
            )
        path.write_bytes(whole)
    states.assert_same(Store(str(directory)).restore(rows)[0], VALUES, rows)


def test_a_damaged_index_is_told_without_reading_the_arrays(directory):
    path = directory / "2/index/metadata"
    path.write_bytes(path.read_bytes().replace(b'"at": 2', b'"at": 3'))
    for use in (Store.extra, Store.entries, Store.best):
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
    with pytest.raises(CheckpointError) as error:
        store.extra(2)
    assert str(error.value) == (
        f"checkpoint.step=2 was deleted from {directory} while it was read; use one of "
        "3, or raise checkpoint.keep_last"
    )


def test_a_run_does_not_start_anew_beside_steps_that_lost_files(directory):
    for step in (1, 2):
        (directory / f"{step}/state/_METADATA").unlink()
    for use in (Store.latest, lambda store: store.restore(states.make_rows(VALUES))):
        with pytest.raises(CheckpointError) as error:
            use(Store(str(directory)))
        assert str(error.value) == (
            f"checkpoint.step=2 is not complete in {directory} (state/_METADATA is "
            "missing (No such file or directory)), nor is any other step; restore its "
            "files, or start in another directory"
        )


def test_an_incomplete_step_gives_way_to_the_next_save_of_it(directory):
    (directory / "2/state/_METADATA").unlink()
    rows = states.make_rows(VALUES)
    store = Store(str(directory))
    store.save(2, states.place(VALUES, rows), rows, extra={"at": "again"})
    store.close()
    assert Store(str(directory)).steps() == (1, 2)
    assert store.restore(rows)[1] == {"at": "again"}
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
    assert [record.getMessage() for record in caplog.records] == [
        f"{directory}/2 was saved without checksums, so damage cannot be detected; the "
        "next save has them"
    ]
    (directory / "2/state/manifest.ocdbt").write_bytes(b"")
    assert Store(str(directory)).steps() == (1,)


def test_a_step_whose_checksums_are_lost_is_not_an_old_one(directory, caplog):
    (directory / "2/sums").unlink()
    assert Store(str(directory)).latest() == 1
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "/2 is not complete and is not used: sums is missing"
    )


def test_who_has_read_a_step_alone_comes_to_the_shared_reading(directory, monkeypatch):
    """Fails if the other processes wait for it for ever."""
    read = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(verify, "check_step", lambda _, shared: read.append(shared))
    found = verify.Reader(directory)
    for shared in (False, False, True, True, False):
        found.verify(2, shared=shared)
    assert read == [False, True]
