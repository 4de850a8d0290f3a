"""An index of samples is sorted, whole, and that of its dataset."""

import struct

import crc32c
import numpy as np
import pytest

from zjax.data import metric_index
from zjax.errors import DataError

VALUES = np.array([3.0, 1.0, 2.5, 1.0, 0.0, 3.0, 1.0])


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = metric_index.index_path("", "voc")
    metric_index.write_index(path, "voc", VALUES, "abcd")
    return path


def test_samples_are_sorted_and_equal_ones_stay_in_order(path):
    index = metric_index.open_index(path, "abcd")
    assert index.metric == "voc"
    assert index.values.tolist() == sorted(VALUES.tolist())
    assert index.samples.tolist() == [4, 1, 3, 6, 2, 0, 5]
    assert isinstance(index.samples.base, np.memmap)
    assert [entry.name for entry in path.parent.iterdir()] == ["voc.index"]


@pytest.mark.parametrize("difficulty", [-1, 0, 0.5, 1, 2.5, 3, 9])
def test_a_difficulty_admits_what_is_not_above_it(path, difficulty):
    index = metric_index.open_index(path, "abcd")
    admitted = index.admitted(difficulty).tolist()
    assert sorted(admitted) == np.flatnonzero(difficulty >= VALUES).tolist()
    assert index.num_admitted(difficulty) == len(admitted)


@pytest.mark.parametrize(
    ("percentile", "last", "expected"), [(0, 3, 0), (1, 3, 2), (2, 3, 4), (3, 3, 7)]
)
def test_percentiles_are_of_equal_size_and_the_last_takes_all(
    path, percentile, last, expected
):
    index = metric_index.open_index(path, "abcd")
    assert index.num_admitted_percentile(percentile, last) == expected
    admitted = index.admitted_percentile(percentile, last)
    assert admitted.tolist() == [4, 1, 3, 6, 2, 0, 5][:expected]


def sum_header(content):
    """The header with a checksum that fits."""
    header = content[: metric_index.HEADER_BYTES - 4]
    end = struct.pack("<I", crc32c.crc32c(header))
    return header + end + content[metric_index.HEADER_BYTES :]


def changed(content, position, new):
    return content[:position] + new + content[position + len(new) :]


SIZE = metric_index.HEADER_BYTES + 16 * len(VALUES)
DAMAGE = {
    "empty": (lambda x: b"", "is not a file of checksummed columns"),
    "another-file": (lambda x: b"PK" + x[2:], "is not a file of checksummed columns"),
    "header-cut": (lambda x: x[:99], "is truncated: 99 bytes, less than its header"),
    "one-byte-short": (
        lambda x: x[:-1],
        f"is truncated: {SIZE - 1} bytes, but its header says {SIZE}",
    ),
    "one-byte-long": (
        lambda x: x + b"\0",
        f"is too long: {SIZE + 1} bytes, but its header says {SIZE}",
    ),
    "header-damaged": (
        lambda x: changed(x, 30, b"z"),
        "is damaged: its header does not match its checksum",
    ),
    "a-value-damaged": (
        lambda x: changed(x, SIZE - 3, b"z"),
        "is damaged: it does not match its checksum",
    ),
    "another-format": (
        lambda x: changed(x, 8, b"\7"),
        "is of format 7, but this zjax reads format 1",
    ),
    "a-shard": (
        lambda x: sum_header(changed(x, 12, b"\1")),
        "holds 1 columns of 7 numbers",
    ),
    "any-size": (
        lambda x: sum_header(changed(x, 16, b"\xff" * 8)),
        f"holds 2 columns of {2**64 - 1} numbers",
    ),
    "no-rows": (
        lambda x: sum_header(changed(x, 16, bytes(8))),
        "holds 2 columns of 0 numbers",
    ),
}
REMEDY = "run `zjax data analyze` on this dataset"


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_refused(path, name):
    damage, problem = DAMAGE[name]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError) as error:
        metric_index.open_index(path, "abcd")
    assert str(error.value) == f"index='voc.index' {problem}; {REMEDY}"


def test_every_flipped_byte_is_found(path):
    good = path.read_bytes()
    for position in range(0, len(good), 3):
        path.write_bytes(changed(good, position, bytes([good[position] ^ 0x40])))
        with pytest.raises(DataError, match=r"^index='voc\.index' "):
            metric_index.open_index(path, "abcd")


def test_the_index_of_another_dataset_is_refused(path):
    with pytest.raises(DataError) as error:
        metric_index.open_index(path, "efgh")
    assert str(error.value) == (
        f"index='voc.index' belongs to dataset abcd, but this one is efgh; {REMEDY}"
    )


@pytest.mark.parametrize(
    ("name", "problem"),
    [("nowhere", "does not exist"), (".", "is a directory")],
)
def test_what_is_no_file_is_refused(path, name, problem):
    with pytest.raises(DataError) as error:
        metric_index.open_index(name, "abcd")
    assert str(error.value) == f"index='{name}' {problem}; {REMEDY}"


def test_blocks_of_long_columns_are_joined(path, monkeypatch):
    """Fails if a block of a column that is larger than one block is lost."""
    monkeypatch.setattr(metric_index, "_BLOCK_NUMBERS", 3)
    metric_index.write_index(path, "voc", VALUES, "abcd")
    monkeypatch.setattr(metric_index, "_BLOCK_NUMBERS", 5)
    index = metric_index.open_index(path, "abcd")
    assert index.values.tolist() == sorted(VALUES.tolist())
