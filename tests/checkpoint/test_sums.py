"""Checksums: of every byte, in bounded memory, and of nothing else."""

import os

import crc32c
import numpy as np
import pytest

from zjax.checkpoint import sums
from zjax.storage.files import write_file


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


def test_the_list_is_checked_itself(tmp_path):
    path, known = tmp_path / "sums", {"a b": sums.Sum(5, 1, 2), "c": sums.Sum(0, 3, 0)}
    sums.write_sums(path, known)
    assert sums.read_sums(path) == known
    whole = path.read_bytes()
    assert whole.startswith(b"0000000100000002 5 a b\n")
    for spoiled in (b"", whole[:-1], whole[:-9], whole.replace(b" 5 ", b" 6 ")):
        path.write_bytes(spoiled)
        with pytest.raises(ValueError, match="sums does not match its checksum"):
            sums.read_sums(path)


def test_a_list_that_is_too_long_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sums, "_MAX_BYTES", 10)
    (tmp_path / "sums").write_bytes(bytes(11))
    with pytest.raises(ValueError, match="sums has 11 bytes"):
        sums.read_sums(tmp_path / "sums")
