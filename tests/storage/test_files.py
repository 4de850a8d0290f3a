"""Files of chunks: past the page cache, and readable to others."""

import ctypes
import mmap
import os

import crc32c
import numpy as np
import pytest
import tensorstore

from zjax.storage import files
from zjax.storage.files import CHUNK_BYTES
from zjax.storage.io_threads import Buffers

NUM_BYTES = 4 << 20


def make_content(size=NUM_BYTES):
    content = Buffers(0).take((size,), np.uint8)
    content[:] = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    return content


def cached_bytes(path):
    """How much of a file lies in the page cache."""
    size, pages = os.path.getsize(path), os.path.getsize(path) // mmap.PAGESIZE + 1
    present = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        where = ctypes.c_void_p(ctypes.addressof(start))
        assert libc.mincore(where, ctypes.c_size_t(size), present) == 0
        del start
    return sum(x & 1 for x in present) * mmap.PAGESIZE


@pytest.fixture
def direct(tmp_path):
    files.write_file(f"{tmp_path}/first", make_content(1))
    if not files._FLAGS[os.stat(tmp_path).st_dev]:
        pytest.skip("the file system of tmp_path takes no O_DIRECT")
    return tmp_path


def test_what_is_written_and_read_leaves_the_page_cache_alone(direct):
    """Fails if the host's memory fills with copies of its disks."""
    path, content = f"{direct}/file", make_content()
    files.write_file(path, content)
    assert cached_bytes(path) <= 2 * mmap.PAGESIZE
    found = Buffers(0).take(content.shape, np.uint8)
    files.read_file(path, found)
    np.testing.assert_array_equal(found, content)
    assert cached_bytes(path) <= NUM_BYTES // 16
    with open(path, "rb") as file:
        file.read()
    assert cached_bytes(path) >= NUM_BYTES  # so that the measure can fail


@pytest.mark.parametrize("size", [1, 4095, 4096, 3 * 4096 + 7])
@pytest.mark.parametrize("offset", [0, 8])
def test_any_size_from_any_memory(tmp_path, size, offset):
    path = str(tmp_path / "file")
    content = make_content(size + offset)[offset:]
    files.write_file(path, content)
    found = Buffers(0).take((size + offset,), np.uint8)[offset:]
    files.read_file(path, found)
    np.testing.assert_array_equal(found, content)
    assert os.path.getsize(path) == size + 4


def test_a_shorter_value_replaces_a_longer_one(tmp_path):
    path, content = str(tmp_path / "file"), make_content(9000)
    files.write_file(path, content)
    files.write_file(path, content[:5000])
    found = np.empty(5000, np.uint8)
    files.read_file(path, found)
    np.testing.assert_array_equal(found, content[:5000])


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda x: x[:70] + bytes([x[70] ^ 1]) + x[71:], "does not match its checksum"),
        (lambda x: x[:-1] + bytes([x[-1] ^ 1]), "does not match its checksum"),
        (lambda x: x[:5000], "ends after 5000 bytes"),
    ],
)
def test_damage_is_told(tmp_path, damage, told):
    path, content = tmp_path / "file", make_content(9000)
    files.write_file(str(path), content)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=told):
        files.read_file(str(path), np.empty(9000, np.uint8))


@pytest.mark.parametrize("size", [CHUNK_BYTES, CHUNK_BYTES + 5 * 4096 + 12])
def test_damage_is_told_of_chunks_as_large_and_aligned_as_those_of_a_run(direct, size):
    """Fails if blocks that are read past the page cache are not in the checksum."""
    path, content = f"{direct}/file", make_content(size)
    files.write_file(path, content)
    found = Buffers(0).take((size,), np.uint8)
    assert files._num_direct(found) == size - size % files.BLOCK_BYTES
    files.read_file(path, found)
    np.testing.assert_array_equal(found, content)
    own = files.stored_sum(path)
    assert own == files.check_file(path) == crc32c.crc32c(content.tobytes())
    direct_bytes = files._num_direct(found)
    for place in (0, 4095, 4096, size // 2, direct_bytes - 1, size - 1, size, size + 3):
        with open(path, "r+b") as file:
            for change in (1, 0):
                file.seek(place)
                (byte,) = file.read(1)
                file.seek(place)
                file.write(bytes([byte ^ 1]))
                file.flush()
                if change:
                    with pytest.raises(ValueError, match="does not match its checksum"):
                        files.read_file(path, found)
                    with pytest.raises(ValueError, match="does not match its checksum"):
                        files.check_file(path)
    files.read_file(path, found)


@pytest.mark.parametrize("size", [0, 4])
def test_a_file_without_content_has_no_checksum(tmp_path, size):
    (tmp_path / "file").write_bytes(bytes(size))
    with pytest.raises(ValueError, match=f"ends after {size} bytes"):
        files.check_file(str(tmp_path / "file"))


def test_file_systems_without_direct_access_are_told_once(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(files, "_FLAGS", {})
    opened = os.open

    def refuse(path, flags, *mode, **options):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opened(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", refuse)
    for name in ("first", "second"):
        files.write_file(f"{tmp_path}/{name}", make_content(9000))
    (said,) = (record.getMessage() for record in caplog.records)
    assert said == f"{tmp_path}: files there go through the page cache"


def test_a_chunk_is_one_of_zarr(tmp_path):
    """Fails if a checkpoint could not be read with other tools."""
    content = make_content(8192)
    metadata = {
        "shape": [8192],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [8192]}},
        "codecs": [{"name": "bytes"}, {"name": "crc32c"}],
    }
    kvstore = {"driver": "file", "path": f"{tmp_path}/"}
    spec = {"driver": "zarr3", "kvstore": kvstore, "metadata": metadata}
    opened = tensorstore.open(spec, create=True).result()
    (tmp_path / "c").mkdir()
    files.write_file(f"{tmp_path}/c/0", content)
    np.testing.assert_array_equal(opened.read().result(), content)
