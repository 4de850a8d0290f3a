"""Files of chunks: their sizes, their readers, and how far a large state is."""

import ctypes
import io
import math
import mmap
import os

import crc32c
import jax
import numpy as np
import pytest
import tensorstore
from rich.console import Console

from tests.storage.conftest import SPECS, make_row
from tests.support.disks import block_bytes
from tests.support.offload import make_config, start
from zjax.sharding import memory
from zjax.sharding import plan as plans
from zjax.storage import files, transfers
from zjax.storage.array import DiskArray
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


@pytest.mark.parametrize(
    ("shape", "split", "fewest", "most"),
    [
        ((6287, 4096), 1, 6, 7),
        ((8 * 6287, 4096), 8, 1, 1),
        ((1 << 26,), 1, 16, 16),
        ((8 * 131 * 32, 4096), 8, 2, 32),
        ((3, 5), 1, 1, 1),
    ],
)
def test_chunks_are_neither_tiny_nor_huge(shape, split, fewest, most):
    """Fails if an awkward number of rows makes thousands of files."""
    shard = (shape[0] // split, *shape[1:])
    chunk = files.chunk_shape(shape, shard, 4)
    number = math.prod(math.ceil(n / c) for n, c in zip(shard, chunk, strict=True))
    assert fewest <= number <= most
    if split > 1:
        assert shard[0] % chunk[0] == 0


@pytest.mark.parametrize(
    "shape",
    [(2560, 32, 80), (32, 80, 2560), (2560, 10240), (50257, 2560), (50257, 768)],
)
def test_the_last_chunk_is_nearly_full(shape):
    """Fails if a state of many such arrays takes a quarter more than its numbers."""
    chunk = files.chunk_shape(shape, shape, 4)
    grid = [math.ceil(n / size) for n, size in zip(shape, chunk, strict=True)]
    assert math.prod(grid) * math.prod(chunk) <= 1.001 * math.prod(shape)


@pytest.mark.parametrize("shape", [(16, 12), (96, 4, 40), (40, 1028)])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.usefixtures("small_chunks")
def test_what_files_take_is_known(disks, spec, shape):
    """Fails if an array takes more of a disk than is said, or far less."""
    row = make_row(disks, SPECS[spec], shape=shape)
    x = jax.device_put(np.ones(shape, np.float32), row.stored)
    array = DiskArray.write(x, row).block_until_ready()
    found = block_bytes(array.path)
    assert x.nbytes < found <= files.disk_bytes(row) <= 1.6 * found


def bar_of(monkeypatch, long_bytes, *, is_terminal=True):
    text = io.StringIO()
    console = Console(file=text, force_terminal=is_terminal, width=100)
    monkeypatch.setattr(transfers, "Console", lambda stderr: console)
    monkeypatch.setattr(transfers, "_LONG_BYTES", long_bytes)
    monkeypatch.setattr(plans, "MIN_MOVED_BYTES", 64)
    run = start(make_config("pinned_host"), weights=())
    return text.getvalue(), 8 * memory.stored_bytes(run.plan).host


def test_all_bytes_are_told(monkeypatch):
    """Fails if the bar stops before its end, or goes beyond it."""
    text, total = bar_of(monkeypatch, 1)
    assert "placing the state" in text
    size = f"{total / 1000:.1f}/{total / 1000:.1f} kB"
    assert size in text.rpartition("placing the state")[2]


def test_short_moves_show_nothing(monkeypatch):
    assert bar_of(monkeypatch, 10**9)[0] == ""


def test_a_log_has_a_line_now_and_then(monkeypatch):
    """Fails if a job is silent while its state is placed, or a bar fills its log."""
    assert bar_of(monkeypatch, 1, is_terminal=False)[0] == ""
    monkeypatch.setattr(transfers, "_LINE_SECONDS", 0)
    text, total = bar_of(monkeypatch, 1, is_terminal=False)
    said = f"{total / 1e9:.1f} of {total / 1e9:.1f} GB"
    assert text.splitlines()[-1] == f"placing the state: {said}"
