"""Reads rows of Parquet and Arrow files and streams of ids; skips broken records."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from zjax.data.conversations import refuse
from zjax.errors import DataError, Problem, check_installed
from zjax.files import parse_json, read_text
from zjax.typing import IGNORED


class BrokenRecords:
    """Counts the records that are left out.

    Args:
        skips: Whether broken records are left out, and counted in the log.
        num_told: Number of problems after which records that are not left out raise an
            error; `finish` raises fewer.
    """

    def __init__(self, skips: bool, num_told: int = 1):
        self._skips, self._num_told = skips, num_told
        self._num_broken, self._first = 0, ""
        self._problems: list[Problem] = []

    @property
    def is_lost(self) -> bool:
        """Whether an error is due at the end, so that no more need be written."""
        return bool(self._problems)

    def read(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function on a record; returns None if the record is left out."""
        try:
            return function(*args)
        except DataError as error:
            if not self._skips:
                self._problems += error.problems
                if len(self._problems) >= self._num_told:
                    self._raise_problems()
                return None
            self._num_broken += 1
            self._first = self._first or str(error)
            return None

    def finish(self) -> None:
        """Raises the problems so far, or logs how many records were left out."""
        self._raise_problems()
        if self._num_broken:
            logging.warning(
                "broken records that were left out: %s; the first: %s",
                f"{self._num_broken:,}",
                self._first,
            )

    def _raise_problems(self) -> None:
        """Raises the problems so far, once."""
        problems, self._problems = self._problems, []
        if problems:
            raise DataError(*problems)


REFUSED = BrokenRecords(skips=False)
"""Default for readers: the first broken record raises an error."""


SUFFIXES = (".parquet", ".arrow")
BATCH_ROWS = 1_024
STATE_NAME, SPLITS_NAME = "state.json", "dataset_dict.json"
"""Files that `Dataset.save_to_disk` and `DatasetDict.save_to_disk` write beside the
rows."""
MAX_STATE_BYTES = 1 << 26
_END = b"\xff\xff\xff\xff\0\0\0\0"
"""Last bytes of an Arrow stream; readers take a cut stream for a complete stream."""

Rows = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Table:
    """An open table.

    Args:
        row_bytes: Mean bytes of a row in the file.
        batches: Function `batches(columns)` that yields up to `BATCH_ROWS` rows at a
            time.
    """

    names: Sequence[str]
    row_bytes: int
    batches: Callable[[Sequence[str]], Iterator[Rows]]


@contextlib.contextmanager
def open_table(path: pathlib.Path) -> Iterator[Table]:
    """Opens a Parquet or Arrow file by suffix, in bounded memory."""
    check_installed("pyarrow")
    import pyarrow

    is_parquet = path.suffix.lower() == ".parquet"
    kind = "Parquet" if is_parquet else "Arrow"
    form = "a Parquet file" if is_parquet else "an Arrow stream, the form of datasets"
    open_file = _open_parquet if is_parquet else _open_arrow
    try:
        file, names, num_rows, batches = open_file(path)
    except pyarrow.ArrowException as error:
        raise DataError(_problem(path, f"is not {form}")) from error

    def checked(columns: Sequence[str]) -> Iterator[Rows]:
        # Rows are dicts, in which columns of one name would overwrite each other.
        if repeated := [name for name in columns if names.count(name) > 1]:
            number = names.count(repeated[0])
            problem = f"has {number} columns {repeated[0]!r}"
            raise DataError(Problem("input", str(path), problem, "rename all but one"))
        try:
            yield from batches(columns)
        except (pyarrow.ArrowException, UnicodeDecodeError) as error:
            # Errors of pyarrow may span several lines.
            reason = " ".join(str(error).split())
            problem = f"is a damaged {kind} file ({reason})"
            raise DataError(_problem(path, problem)) from error

    with file:
        yield Table(names, path.stat().st_size // max(1, num_rows), checked)


def _open_parquet(path: pathlib.Path) -> tuple[Any, list[str], int, Any]:
    """Opens a Parquet file; returns file, column names, number of rows, and reader."""
    from pyarrow import parquet

    file = parquet.ParquetFile(path)

    def batches(columns: Sequence[str]) -> Iterator[Rows]:
        for batch in file.iter_batches(BATCH_ROWS, columns=[*columns]):
            yield batch.to_pylist()

    return file, file.schema_arrow.names, file.metadata.num_rows, batches


def _open_arrow(path: pathlib.Path) -> tuple[Any, list[str], int, Any]:
    """Opens an Arrow stream, mapped into memory and not read before use."""
    import pyarrow

    file = pyarrow.memory_map(str(path))
    names = pyarrow.ipc.open_stream(file).schema.names

    file.seek(max(0, file.size() - len(_END)))
    if file.read() != _END:
        raise DataError(_problem(path, "is cut off: its stream of rows has no end"))

    def stream() -> Iterator[Any]:
        file.seek(0)
        yield from pyarrow.ipc.open_stream(file)

    def batches(columns: Sequence[str]) -> Iterator[Rows]:
        for batch in stream():
            chosen = batch.select([*columns])
            chosen.validate(full=True)  # else damaged offsets would end the process
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield chosen.slice(start, BATCH_ROWS).to_pylist()

    return file, names, sum(batch.num_rows for batch in stream()), batches


def saved_files(folder: pathlib.Path) -> list[pathlib.Path] | None:
    """Files of rows in a directory of `Dataset.save_to_disk`, in order; else None."""
    if (folder / SPLITS_NAME).is_file():
        splits = sorted(x.parent.name for x in folder.glob(f"*/{STATE_NAME}"))
        problem = f"holds the splits {', '.join(splits)}"
        remedy = f"give one of them, such as {folder / next(iter(splits), 'train')}"
        raise DataError(Problem("input", str(folder), problem, remedy))
    if not (folder / STATE_NAME).is_file() or not any(folder.glob("*.arrow")):
        return None
    try:
        state = parse_json(read_text(folder / STATE_NAME, MAX_STATE_BYTES))
        names = [str(each["filename"]) for each in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"has a broken {STATE_NAME} ({type(error).__name__}: {error})"
        raise DataError(_problem(folder, problem)) from error
    # Names only: a state file must not lead to other folders.
    files = [folder / pathlib.PurePath(name).name for name in names]
    missing = [file.name for file in files if not file.is_file()]
    # An indices file, as after `shuffle` or `select`, gives the rows another order.
    if missing or state.get("_indices_data_files"):
        problem = f"lacks {missing[0]}" if missing else "has rows in another order"
        raise DataError(_problem(folder, problem))
    return files


def _problem(path: pathlib.Path, problem: str) -> Problem:
    remedy = "leave it out or make it again"
    return Problem("input", str(path), problem, remedy)


LABELS, MASK = "labels", "attention_mask"
"""Columns that are read beside a column of ids."""
STREAM_SUFFIX = ".bin"
"""Suffix of a stream of little-endian uint16, as nanoGPT writes."""
BLOCK_TOKENS = 1 << 15


class TokenIds(NamedTuple):
    """Ids of one document."""

    ids: np.ndarray
    answers: np.ndarray | None = None


def read_ids(
    record: Mapping[str, Any], field: str, path: pathlib.Path, where: str
) -> TokenIds:
    """Reads the ids of a record, without the tokens that `attention_mask` leaves out.

    Example:
        >>> record = {"input_ids": [5, 6], "labels": [-100, 6]}
        >>> read_ids(record, "input_ids", pathlib.Path("a.jsonl"), "line 1").answers
        array([0, 1], dtype=uint8)
    """
    ids = _list_of(record, field, path, where)
    if ids.size and ids.min() < 0:
        refuse(path, where, f"has a negative id in {field!r}", "leave it out")
    answers = None
    if record.get(LABELS) is not None:
        # Labels shifted by one, a common mistake, differ from the ids and are refused.
        labels = _list_of(record, LABELS, path, where)
        if labels.shape != ids.shape or np.any((labels != ids) & (labels != IGNORED)):
            problem = (
                f"has {LABELS} that are neither the ids of {field!r} nor {IGNORED}"
            )
            remedy = f"copy the ids without a shift, and write {IGNORED} for no loss"
            refuse(path, where, problem, remedy)
        answers = (labels != IGNORED).astype(np.uint8)
    if record.get(MASK) is not None:
        is_token = _list_of(record, MASK, path, where) != 0
        if is_token.shape != ids.shape:
            problem = f"has {is_token.size} values in {MASK!r} for {ids.size} ids"
            refuse(path, where, problem, "give one for each id")
        ids = ids[is_token]
        answers = None if answers is None else answers[is_token]
    return TokenIds(ids, answers)


def _list_of(
    record: Mapping[str, Any], field: str, path: pathlib.Path, where: str
) -> np.ndarray:
    """Makes an array of a list of integers; int64[0] of an empty list."""
    values = record[field]
    found = np.asarray(values) if isinstance(values, list) else np.zeros(())
    # NumPy makes an empty list an array of floats.
    if found.size == 0 and found.ndim == 1:
        return np.zeros(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        problem = f"has no list of integers as {field!r}"
        refuse(path, where, problem, "write token ids, or text")
    return found.astype(np.int64)


def read_stream(path: pathlib.Path) -> Iterator[np.ndarray]:
    """Reads a stream of ids in blocks."""
    if path.stat().st_size % 2:
        problem, remedy = "has an odd number of bytes", "give little-endian uint16"
        refuse(path, "its stream", problem, remedy)
    with open(path, "rb") as file:
        while content := file.read(2 * BLOCK_TOKENS):
            yield np.frombuffer(content, "<u2").astype(np.int64)
