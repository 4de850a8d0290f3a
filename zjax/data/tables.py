"""Rows of Parquet files, and of the Arrow files of the `datasets` library."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from zjax.errors import DataError, Problem
from zjax.packages import check_installed
from zjax.reading import parse_json, read_text

SUFFIXES = (".parquet", ".arrow")
BATCH_ROWS = 1_024
STATE_NAME, SPLITS_NAME = "state.json", "dataset_dict.json"
"""What `Dataset.save_to_disk` and `DatasetDict.save_to_disk` write beside the rows."""
MAX_STATE_BYTES = 1 << 26
_END = b"\xff\xff\xff\xff\0\0\0\0"
"""Last bytes of an Arrow stream, without which a reader takes it for a shorter one."""

Rows = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Table:
    """An open file.

    Args:
        names: Names of the columns.
        row_bytes: Mean bytes of a row in the file.
        batches: `batches(columns)` yields at most `BATCH_ROWS` rows at a time.
    """

    names: Sequence[str]
    row_bytes: int
    batches: Callable[[Sequence[str]], Iterator[Rows]]


@contextlib.contextmanager
def open_table(path: pathlib.Path) -> Iterator[Table]:
    """Opens a file by its suffix, in bounded memory.

    Raises:
        DataError: It is not such a file, or is damaged; while rows are read, also that
            several columns have one name.
    """
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
        if repeated := [name for name in columns if names.count(name) > 1]:
            number = names.count(repeated[0])
            problem = f"has {number} columns {repeated[0]!r}"
            raise DataError(Problem("input", str(path), problem, "rename all but one"))
        try:
            yield from batches(columns)
        except (pyarrow.ArrowException, UnicodeDecodeError) as error:
            reason = " ".join(str(error).split())
            problem = f"is a damaged {kind} file ({reason})"
            raise DataError(_problem(path, problem)) from error

    with file:
        yield Table(names, path.stat().st_size // max(1, num_rows), checked)


def _open_parquet(path: pathlib.Path) -> tuple[Any, list[str], int, Any]:
    from pyarrow import parquet

    file = parquet.ParquetFile(path)

    def batches(columns: Sequence[str]) -> Iterator[Rows]:
        for batch in file.iter_batches(BATCH_ROWS, columns=[*columns]):
            yield batch.to_pylist()

    return file, file.schema_arrow.names, file.metadata.num_rows, batches


def _open_arrow(path: pathlib.Path) -> tuple[Any, list[str], int, Any]:
    """A stream of batches, which is mapped into memory and not read before use."""
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
    """The files of rows in a directory that `Dataset.save_to_disk` wrote, in order.

    Returns:
        The files; None for any other directory.

    Raises:
        DataError: It holds several splits, or its `state.json` cannot be used.
    """
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
    files = [folder / pathlib.PurePath(name).name for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing or state.get("_indices_data_files"):
        problem = f"lacks {missing[0]}" if missing else "has rows in another order"
        raise DataError(_problem(folder, problem))
    return files


def _problem(path: pathlib.Path, problem: str) -> Problem:
    remedy = "leave it out or make it again"
    return Problem("input", str(path), problem, remedy)
