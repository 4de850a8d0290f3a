"""Index of a metric, sorted from easy to hard, in memory-mapped files of columns."""

import dataclasses
import os
import pathlib
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import crc32c
import numpy as np
from jaxtyping import Float64, Int64

from zjax.errors import DataError, Problem, find_fault
from zjax.files import new_file

MAGIC = b"ZJAXCOLS"
FORMAT = 1
MAX_ROWS = 1 << 40
DIGEST_BYTES, NAME_BYTES = 32, 256
# Magic, format, number of columns and rows, digest, name, checksum of the columns.
_HEADER = struct.Struct(f"<8sIIQ{DIGEST_BYTES}s{NAME_BYTES}sI")
_SUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _SUM.size
_BLOCK_NUMBERS = 1 << 19
"""Numbers that are written or checked at a time."""


class Columns(NamedTuple):
    """Header values of an opened file, and the memory-mapped columns."""

    digest: str
    name: str
    checksum: int
    arrays: list[np.ndarray]


def write_columns(
    path: pathlib.Path, columns: Sequence[np.ndarray], *, digest: str, name: str
) -> None:
    """Writes a file that appears only when it is complete and on the disk.

    Columns are int64[n] or float64[n], with equal n of 1 or more.
    """
    with new_file(path) as partial, open(partial, "wb") as file:
        # The header, with the checksum, is written last.
        file.seek(HEADER_BYTES)
        crc = 0
        for block in _blocks(columns):
            content = block.astype(block.dtype.newbyteorder("<")).tobytes()
            crc = crc32c.crc32c(content, crc)
            file.write(content)
        sizes = len(columns), len(columns[0])
        texts = digest.encode(), name.encode()
        header = _HEADER.pack(MAGIC, FORMAT, *sizes, *texts, crc)
        file.seek(0)
        file.write(header + _SUM.pack(crc32c.crc32c(header)))


def open_columns(
    path: pathlib.Path, dtypes: Sequence[str], *, field: str, remedy: str
) -> Columns:
    """Maps a file of `write_columns` once all bytes match the checksums.

    `dtypes` has `<f8` or `<i8` for each column.
    """
    try:
        fault = find_fault(path) or _find_damage(path, len(dtypes))
    except OSError as error:
        fault = f"cannot be read ({error.strerror or error})"
    if fault:
        raise DataError(Problem(field, str(path), fault, remedy))
    return map_columns(path, dtypes)


def map_columns(path: pathlib.Path, dtypes: Sequence[str]) -> Columns:
    """Maps a file that `open_columns` has verified, without reading the columns."""
    _, _, num_columns, num_rows, digest, name, crc = _HEADER.unpack(_read_header(path))
    # Both dtypes have 8 bytes; the file does not name dtypes.
    content = np.memmap(path, "<i8", "r", HEADER_BYTES, (num_columns, num_rows))
    arrays = [row.view(dtype) for row, dtype in zip(content, dtypes, strict=True)]
    digest, name = (text.rstrip(b"\0").decode() for text in (digest, name))
    return Columns(digest, name, crc, arrays)


def _read_header(path: pathlib.Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(HEADER_BYTES)[: -_SUM.size]


def _find_damage(path: pathlib.Path, expected_columns: int) -> str:
    """Reason why a regular file cannot be used; empty if the file is intact."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(HEADER_BYTES)
        if start[: len(MAGIC)] != MAGIC:
            return "is not a file of checksummed columns"
        if len(start) < HEADER_BYTES:
            return f"is truncated: {size} bytes, less than its header"
        header, stored = start[: -_SUM.size], start[-_SUM.size :]
        _, version, num_columns, num_rows, _, _, crc = _HEADER.unpack(header)
        if version != FORMAT:
            return f"is of format {version}, but this zjax reads format {FORMAT}"
        # After the version: another format may have another header.
        if _SUM.pack(crc32c.crc32c(header)) != stored:
            return "is damaged: its header does not match its checksum"
        if num_columns != expected_columns or not 0 < num_rows <= MAX_ROWS:
            return f"holds {num_columns} columns of {num_rows} numbers"
        expected = HEADER_BYTES + 8 * num_columns * num_rows
        if size != expected:
            state = "truncated" if size < expected else "too long"
            return f"is {state}: {size} bytes, but its header says {expected}"
        found = 0
        while block := file.read(8 * _BLOCK_NUMBERS):
            found = crc32c.crc32c(block, found)
    return "" if found == crc else "is damaged: it does not match its checksum"


def _blocks(columns: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    for column in columns:
        for start in range(0, len(column), _BLOCK_NUMBERS):
            yield column[start : start + _BLOCK_NUMBERS]


_DTYPES = "<f8", "<i8"


@dataclasses.dataclass(frozen=True)
class Index:
    """Samples sorted by the value of a metric; memory-mapped, and pickled as a path.

    Example:
        >>> index = Index("voc", np.array([1.0, 4.0, 4.0]), np.array([2, 0, 1]))
        >>> index.admitted(3.0).tolist(), index.admitted(4.0).tolist()
        ([2], [2, 0, 1])
        >>> index.admitted_percentile(1, last=2).tolist()
        [2]
    """

    metric: str
    values: Float64[np.ndarray, " n"]
    """Value of each sample, ascending."""
    samples: Int64[np.ndarray, " n"]
    """Number of the sample of each value; equal values have ascending numbers."""
    checksum: int = 0
    """CRC-32C of values and samples; 0 if not read from a file."""
    path: pathlib.Path | None = None
    """Path of the file, which other processes map after unpickling."""

    def __reduce__(self):
        if self.path is not None:
            return _map_index, (self.path, self.checksum)
        return Index, (self.metric, self.values, self.samples)

    def num_admitted(self, difficulty: int | float) -> int:
        """Counts the samples of at most value `difficulty`, which form a prefix."""
        return int(np.searchsorted(self.values, difficulty, "right"))

    def admitted(self, difficulty: int | float) -> Int64[np.ndarray, " admitted"]:
        """Samples of at most value `difficulty`, the easiest first."""
        return self.samples[: self.num_admitted(difficulty)]

    def num_admitted_percentile(self, percentile: int, last: int = 100) -> int:
        """Counts the easiest samples up to a percentile.

        Args:
            percentile: Percentile, 0 to `last`.
            last: Percentile at which all samples are admitted, 1 or more.

        Reference:
            DeepSpeed's sampler: `n // last` samples per percentile, and all at the end.
        """
        n = len(self.samples)
        # Floor before the product, as in DeepSpeed: percentiles have equal sizes.
        return n if percentile >= last else n // last * percentile

    def admitted_percentile(
        self, percentile: int, last: int = 100
    ) -> Int64[np.ndarray, " admitted"]:
        """Easiest samples up to a percentile; see `num_admitted_percentile`."""
        return self.samples[: self.num_admitted_percentile(percentile, last)]


def index_path(output: str | os.PathLike[str], metric: str) -> pathlib.Path:
    """Path of the index of a metric in the folder of `zjax data analyze`."""
    return pathlib.Path(output) / f"{metric.replace(':', '.')}.index"


def write_index(
    path: pathlib.Path, metric: str, values: Float64[np.ndarray, " n"], digest: str
) -> None:
    """Sorts samples by value and writes the index atomically."""
    # Stable: samples of equal value stay in the order of the dataset.
    order = np.argsort(values, kind="stable")
    columns = [values[order], order]
    write_columns(path, columns, digest=digest, name=metric)


def open_index(
    path: str | os.PathLike[str], digest: str, field: str = "index"
) -> Index:
    """Maps the index of a metric once it is known to be intact and of this dataset.

    Args:
        path: Path of a file of `zjax data analyze`.
        digest: Digest of the dataset; see `zjax.data.source.digest_samples`.
        field: Name of the setting in messages.

    Returns:
        Index with memory-mapped arrays.

    Raises:
        DataError: The file is missing, truncated or damaged, or belongs to another
            dataset.
    """
    remedy = "run `zjax data analyze` on this dataset"
    opened = open_columns(pathlib.Path(path), _DTYPES, field=field, remedy=remedy)
    if opened.digest != digest:
        problem = f"belongs to dataset {opened.digest}, but this one is {digest}"
        raise DataError(Problem(field, str(path), problem, remedy))
    return _index_of(pathlib.Path(path), opened)


def _map_index(path: pathlib.Path, checksum: int) -> Index:
    """Maps an index that another process has verified."""
    mapped = map_columns(path, _DTYPES)
    if mapped.checksum != checksum:
        problem, remedy = "was replaced while the run started", "start the run again"
        raise DataError(Problem("index", str(path), problem, remedy))
    return _index_of(path, mapped)


def _index_of(path: pathlib.Path, columns: Columns) -> Index:
    return Index(columns.name, *columns.arrays, checksum=columns.checksum, path=path)
