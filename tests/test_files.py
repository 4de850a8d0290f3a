"""Files appear complete or not at all; files of others are read within bounds."""

import os

import pytest

from zjax import files
from zjax.files import parse_json, read_text


@pytest.fixture
def synced(monkeypatch):
    """Paths that were synced or renamed, in order."""
    done, sync, replace = [], os.fsync, os.replace

    def keep_sync(descriptor):
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    def keep_replace(source, target):
        done.append(f"renamed {target}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", keep_sync)
    monkeypatch.setattr(os, "replace", keep_replace)
    return done


def test_a_directory_is_on_disk_before_it_has_its_name(tmp_path, synced):
    """Fails if a crash could leave an empty file, or a name without a directory."""
    with files.new_directory(tmp_path / "new" / "a") as partial:
        (partial / "sub").mkdir()
        (partial / "sub" / "x").write_text("x")
    assert (tmp_path / "new" / "a" / "sub" / "x").read_text() == "x"
    assert synced[0] == f"{tmp_path}"  # the name of `new`
    named = synced.index(f"renamed {tmp_path}/new/a")
    assert {*synced[1:named]} == {f"{partial}{x}" for x in ("", "/sub", "/sub/x")}
    assert synced[named + 1 :] == [f"{tmp_path}/new"]


def test_a_file_is_on_disk_before_it_has_its_name(tmp_path, synced):
    with files.new_file(tmp_path / "a") as partial:
        partial.write_text("x")
    assert synced == [f"{partial}", f"renamed {tmp_path}/a", f"{tmp_path}"]


def test_a_new_directory_is_synced_with_each_new_parent(tmp_path, synced):
    """Fails if a crash could lose a run whose checkpoints were synced."""
    files.make_directory(tmp_path / "a" / "b")
    assert synced == [f"{tmp_path}/a", f"{tmp_path}"]
    files.make_directory(tmp_path / "a" / "b")
    assert len(synced) == 2


@pytest.mark.parametrize("write", [files.new_file, files.new_directory])
def test_an_error_leaves_nothing(tmp_path, write):
    with pytest.raises(KeyError), write(tmp_path / "b") as partial:
        if write is files.new_file:
            partial.write_text("half")
        raise KeyError
    assert [*tmp_path.iterdir()] == []


def test_killed_writers_are_cleaned_up_after_and_living_ones_are_not(tmp_path):
    """Fails if leftovers stay for ever, or the files of a living writer are removed."""
    target = tmp_path / "a"
    for name in (".a.0f.partial", ".a.412.partial", ".ab.0f.partial"):  # unlocked
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("half")
    with files.new_directory(target) as living:
        with files.new_directory(target) as partial:
            names = {path.name for path in tmp_path.iterdir()}
            assert names == {living.name, partial.name, ".ab.0f.partial"}
            (partial / "file").write_text("whole")
        assert (target / "file").read_text() == "whole"
        (target / "file").unlink()
    assert {path.name for path in tmp_path.iterdir()} == {"a", ".ab.0f.partial"}


def test_a_file_is_read_up_to_its_bound(tmp_path):
    path = tmp_path / "a"
    path.write_text("é" * 4)
    assert read_text(path, 8) == "éééé"
    with pytest.raises(ValueError, match="it has more than 7 bytes"):
        read_text(path, 7)


def test_what_is_no_text_is_said(tmp_path):
    (tmp_path / "a").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="it is not UTF-8 text"):
        read_text(tmp_path / "a")


def test_pipes_devices_and_folders_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path):
        with pytest.raises(OSError, match="it is not a regular file"):
            read_text(path)


@pytest.mark.parametrize("text", ["[" * 10**6, '{"a":' * 10**6, "{", "", "9" * 5000])
def test_json_that_cannot_be_read_is_a_value_error(text):
    with pytest.raises(ValueError):
        parse_json(text)
