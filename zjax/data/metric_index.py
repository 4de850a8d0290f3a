"""The index of a metric: the samples of a dataset from the easiest to the hardest."""

import dataclasses
import os
import pathlib

import numpy as np
from jaxtyping import Float64, Int64

from zjax.data import column_file
from zjax.errors import DataError, Problem

_DTYPES = "<f8", "<i8"


@dataclasses.dataclass(frozen=True)
class Index:
    """Samples sorted by the value of a metric; memory-mapped, and pickled as its file.

    Example:
        >>> index = Index("voc", np.array([1.0, 4.0, 4.0]), np.array([2, 0, 1]))
        >>> index.admitted(3.0).tolist(), index.admitted(4.0).tolist()
        ([2], [2, 0, 1])
        >>> index.admitted_percentile(1, last=2).tolist()
        [2]
    """

    metric: str
    values: Float64[np.ndarray, " n"]
    """Ascending."""
    samples: Int64[np.ndarray, " n"]
    """Number of the sample of each value; equal values have ascending numbers."""
    checksum: int = 0
    """CRC-32C of both; 0 if they are not read from a file."""
    path: pathlib.Path | None = None
    """The file, from which other processes map what they get of it."""

    def __reduce__(self):
        if self.path is not None:
            return _map_index, (self.path, self.checksum)
        return Index, (self.metric, self.values, self.samples)

    def num_admitted(self, difficulty: int | float) -> int:
        """Counts the samples whose value is at most `difficulty`: a prefix."""
        return int(np.searchsorted(self.values, difficulty, "right"))

    def admitted(self, difficulty: int | float) -> Int64[np.ndarray, " admitted"]:
        """The samples whose value is at most `difficulty`, the easiest first."""
        return self.samples[: self.num_admitted(difficulty)]

    def num_admitted_percentile(self, percentile: int, last: int = 100) -> int:
        """Counts the easiest samples up to a percentile.

        Args:
            percentile: 0 to `last`.
            last: Percentile at which all samples are admitted, 1 or more.

        Reference:
            DeepSpeed's sampler: `n // last` samples per percentile, and all at the end.
        """
        n = len(self.samples)
        return n if percentile >= last else n // last * percentile

    def admitted_percentile(
        self, percentile: int, last: int = 100
    ) -> Int64[np.ndarray, " admitted"]:
        """The easiest samples up to a percentile; see `num_admitted_percentile`."""
        return self.samples[: self.num_admitted_percentile(percentile, last)]


def index_path(output: str | os.PathLike[str], metric: str) -> pathlib.Path:
    """Path of the index of a metric in the folder of `zjax data analyze`.

    Example:
        >>> index_path("index", "voc").name, index_path("index", "mine:score").name
        ('voc.index', 'mine.score.index')
    """
    return pathlib.Path(output) / f"{metric.replace(':', '.')}.index"


def write_index(
    path: pathlib.Path, metric: str, values: Float64[np.ndarray, " n"], digest: str
) -> None:
    """Sorts samples by value and writes their index atomically.

    Args:
        path: Path of the file, replaced if there is one.
        metric: Name of the metric.
        values: Value of each sample, in the order of the dataset.
        digest: Digest of the dataset.

    Raises:
        OSError: The file cannot be written.
    """
    order = np.argsort(values, kind="stable")
    columns = [values[order], order]
    column_file.write_columns(path, columns, digest=digest, name=metric)


def open_index(
    path: str | os.PathLike[str], digest: str, field: str = "index"
) -> Index:
    """Maps the index of a metric once it is known to be whole and of this dataset.

    Args:
        path: File of `zjax data analyze`.
        digest: Digest of the dataset; see `zjax.data.source.digest_samples`.
        field: Name of the file in messages.

    Returns:
        The index; its arrays stay on the disk.

    Raises:
        DataError: The file is missing, truncated or damaged, or belongs to another
            dataset.
    """
    remedy = "run `zjax data analyze` on this dataset"
    opened = column_file.open_columns(
        pathlib.Path(path), _DTYPES, field=field, remedy=remedy
    )
    if opened.digest != digest:
        problem = f"belongs to dataset {opened.digest}, but this one is {digest}"
        raise DataError(Problem(field, str(path), problem, remedy))
    return _index_of(pathlib.Path(path), opened)


def _map_index(path: pathlib.Path, checksum: int) -> Index:
    """Maps an index that was found to be whole, in another process.

    Raises:
        DataError: The file is another by now.
    """
    mapped = column_file.map_columns(path, _DTYPES)
    if mapped.checksum != checksum:
        problem, remedy = "was replaced while the run started", "start the run again"
        raise DataError(Problem("index", str(path), problem, remedy))
    return _index_of(path, mapped)


def _index_of(path: pathlib.Path, columns: column_file.Columns) -> Index:
    return Index(columns.name, *columns.arrays, checksum=columns.checksum, path=path)
