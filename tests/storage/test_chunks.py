"""Files of arrays are neither tiny nor huge, and take what is said."""

import math

import jax
import numpy as np
import pytest

from tests.storage.conftest import SPECS, make_row
from tests.support.disks import block_bytes
from zjax.storage import files
from zjax.storage.array import DiskArray


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
