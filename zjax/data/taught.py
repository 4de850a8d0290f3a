"""Outcomes of a teacher for rows of data, computed once and stored in a directory.

- `teacher.json`: what the outcomes were made from, with a checksum
- `rows`: int64, numbers of the stored rows, ascending
- `00000.outcomes`: for each token of the first stored rows, the k most likely tokens,
  and k + 1 log-probabilities in float32: of the tokens, then of all others together
- `*.sums`: checksums of each file, by chunk, written last: a part without is incomplete

See `zjax.ops.divergence` for the outcomes.
"""

import dataclasses
import hashlib
import json
import pathlib
from typing import Any

import numpy as np
from jaxtyping import Int64

from zjax.data import source, store
from zjax.data.draws import Draw, Draws, Order
from zjax.data.packing import Rows
from zjax.data.sums import REMEDY, SummedFile, sums_path
from zjax.errors import ConfigError, DataError, Problem, find_fault
from zjax.files import local_path, new_directory, parse_json, read_text, writing
from zjax.settings import schema
from zjax.typing import Batch

MAX_TOP_K = 256
IDS, LOGPROBS = "teacher/ids", "teacher/logprobs"
"""Names of the arrays of outcomes in a batch, int32[B, L, K] and float32[B, L, K + 1].
"""
ARRAYS = IDS, LOGPROBS
ORIGIN_NAME = "teacher.json"
FORMAT = 1
_ROWS_NAME = "rows"
_FIELD = "distill.teacher"
_AGAIN = "write it again by `zjax data teach`"
_PART_BYTES = 1 << 28
_STEPS = 1_024
"""Steps whose rows are collected at a time."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """What outcomes were made from, and how they are stored."""

    settings: dict[str, Any]
    """Values, by setting, that the tokens of rows and the outcomes depend on."""
    teacher: str
    """Digest of the checkpoint of the teacher, and of the dtype of its pass."""
    top_k: int
    num_rows: int
    """Number of stored rows."""
    rows_per_part: int

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.settings["data.length"]

    @property
    def record(self) -> np.dtype:
        """Dtype of the outcomes of a token."""
        id_type = "<u2" if self.settings["model.vocab_size"] <= 1 << 16 else "<u4"
        ids = ("ids", id_type, (self.top_k,))
        return np.dtype([ids, ("logprobs", "<f4", (self.top_k + 1,))])

    @property
    def parts(self) -> list[range]:
        """Places of the rows of each part."""
        starts = range(0, self.num_rows, self.rows_per_part)
        return [range(i, min(i + self.rows_per_part, self.num_rows)) for i in starts]

    def digest(self) -> str:
        """Hashes all values; 16 hexadecimal digits."""
        content = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def is_stored(path: str) -> bool:
    """Whether `distill.teacher` names stored outcomes instead of a run."""
    return (
        bool(path) and (pathlib.Path(local_path(_FIELD, path)) / ORIGIN_NAME).exists()
    )


def taught_settings(
    data: schema.Data, vocab_size: int, temperature: float
) -> dict[str, Any]:
    """Values of settings that outcomes depend on, by path."""
    return source.row_settings(data) | {
        "model.vocab_size": vocab_size,
        "distill.temperature": float(temperature),
    }


def make_origin(
    settings: dict[str, Any],
    rows: Rows,
    *,
    teacher: str,
    top_k: int,
    num_rows: int,
    batch_size: int,
) -> Origin:
    """Describes outcomes that are to be stored; parts hold whole batches.

    `settings` are values of `taught_settings`; `Origin` describes the other arguments.
    """
    origin = Origin(settings | _content_of(rows), teacher, top_k, num_rows, 1)
    batch_bytes = batch_size * origin.length * origin.record.itemsize
    per_part = batch_size * max(1, _PART_BYTES // batch_bytes)
    return dataclasses.replace(origin, rows_per_part=per_part)


def _content_of(rows: Rows) -> dict[str, Any]:
    """Values that tell the rows of one dataset from another's, by name."""
    return {"data.digest": rows.digest(), "data.num_rows": len(rows)}


def without_outcomes(batch: Batch) -> Batch:
    """Returns a batch without the arrays of outcomes.

    Example:
        >>> without_outcomes({"tokens": 1, IDS: 2, LOGPROBS: 3})
        {'tokens': 1}
    """
    return {name: x for name, x in batch.items() if name not in ARRAYS}


def stage_rows(order: Order, num_steps: int) -> Int64[np.ndarray, " n"]:
    """Lists the rows that the first steps of an order draw, ascending."""
    found = np.zeros(0, np.int64)
    for first in range(0, num_steps, _STEPS):
        steps = range(first, min(first + _STEPS, num_steps))
        found = np.unique(np.concatenate([found, *map(order.indices, steps)]))
    return found


class OutcomeWriter:
    """Writes outcomes, part by part; goes on with the parts of an earlier call.

    Raises:
        ConfigError: The directory holds other files, or outcomes of another origin.
    """

    def __init__(
        self, directory: pathlib.Path, origin: Origin, rows: Int64[np.ndarray, " n"]
    ):
        self.directory, self.origin = directory, origin
        if (directory / ORIGIN_NAME).exists():
            self._check_origin()
            return
        if directory.exists() and any(directory.iterdir()):
            problem, remedy = "is not empty", "name a new directory"
            raise ConfigError(Problem("--output", str(directory), problem, remedy))
        content = dataclasses.asdict(origin) | {"format": FORMAT}
        content[store.SUM_KEY] = store.sum_of(content)
        with writing(directory / ORIGIN_NAME), new_directory(directory) as partial:
            _write(partial / _ROWS_NAME, rows.astype("<i8"))
            (partial / ORIGIN_NAME).write_text(json.dumps(content, indent=2) + "\n")

    def _check_origin(self) -> None:
        """Refuses to add parts to outcomes of another origin."""
        path = str(self.directory)
        found = dataclasses.asdict(_read_origin(path, "--output"))
        wanted = dataclasses.asdict(self.origin)
        found, wanted = (x.pop("settings") | x for x in (found, wanted))
        changed = [name for name in wanted if found.get(name) != wanted[name]]
        if changed:
            name = changed[0]
            problem = f"holds outcomes of {name}={found.get(name)!r}, not of "
            problem += repr(wanted[name])
            remedy = "name another directory, or remove this one"
            raise ConfigError(Problem("--output", path, problem, remedy))

    def missing_parts(self) -> list[int]:
        """Numbers of the parts that are not written."""
        return _missing(self.directory, self.origin)

    def write(self, part: int, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Writes the outcomes of the rows of a part.

        Args:
            part: Number of the part.
            ids: Most likely tokens, int32[R, L, K].
            logprobs: Log-probabilities, float32[R, L, K + 1].
        """
        records = np.empty(ids.shape[:2], self.origin.record)
        records["ids"], records["logprobs"] = ids, logprobs
        path = _part_path(self.directory, part)
        with writing(path):
            _write(path, records)


def _write(path: pathlib.Path, content: np.ndarray) -> None:
    """Writes an array, and the checksums once it is on disk."""
    file = SummedFile(path)
    file.write(content.tobytes())
    file.close()


def _part_path(directory: pathlib.Path, part: int) -> pathlib.Path:
    return directory / f"{part:05}.outcomes"


def _missing(directory: pathlib.Path, origin: Origin) -> list[int]:
    """Numbers of the parts without checksums."""
    numbers = range(len(origin.parts))
    return [n for n in numbers if not sums_path(_part_path(directory, n)).exists()]


def _read_origin(path: str, field: str = _FIELD) -> Origin:
    """Reads and verifies `teacher.json`."""

    def error(problem: str, remedy: str = _AGAIN) -> DataError:
        return DataError(Problem(field, path, f"{problem} {ORIGIN_NAME}", remedy))

    try:
        content = parse_json(read_text(pathlib.Path(path) / ORIGIN_NAME))
        given = content.pop(store.SUM_KEY)
    except (OSError, ValueError, AttributeError, KeyError) as fault:
        raise error("has a broken") from fault
    if given != store.sum_of(content):
        raise error("does not match the checksum of its", REMEDY)
    if content.pop("format", None) != FORMAT:
        raise error(f"has not the format {FORMAT} in its")
    return Origin(**content)


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """Stored outcomes of a teacher, mapped from files.

    Reads are verified by checksums.
    """

    path: str
    origin: Origin
    rows: Int64[np.ndarray, " n"]
    """Numbers of the stored rows, ascending."""
    parts: tuple[store.MappedTokens, ...]

    def check_rows(self, wanted: Int64[np.ndarray, " n"]) -> None:
        """Refuses rows that are not stored."""
        num_missing = len(np.setdiff1d(wanted, self.rows))
        if num_missing:
            problem = f"lacks {num_missing:,} of {len(wanted):,} rows that the stage "
            problem += "draws"
            remedy = "use the seed, global_batch_size and steps it was written with, "
            remedy += f"or {_AGAIN}"
            raise DataError(Problem(_FIELD, self.path, problem, remedy))

    def read(self, indices: Int64[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """Reads the outcomes of rows that are stored."""
        size, num_bytes = self.origin.rows_per_part, self._row_bytes
        records = np.empty((len(indices), self.origin.length), self.origin.record)
        for row, place in enumerate(np.searchsorted(self.rows, indices).tolist()):
            part, start = self.parts[place // size], place % size * num_bytes
            content = part[start : start + num_bytes]
            records[row] = np.ascontiguousarray(content).view(self.origin.record)
        ids = records["ids"].astype(np.int32)
        return {IDS: ids, LOGPROBS: np.ascontiguousarray(records["logprobs"])}

    @property
    def _row_bytes(self) -> int:
        return self.origin.length * self.origin.record.itemsize


def read_origin(teacher: str, settings: dict[str, Any]) -> Origin:
    """Reads what the outcomes in a directory were made from.

    Raises:
        DataError: The outcomes are damaged, or of others than the given `settings`.
    """
    path = local_path(_FIELD, teacher)
    origin = _read_origin(path)
    _check_same(origin, settings, path)
    return origin


def open_outcomes(teacher: str, settings: dict[str, Any], rows: Rows) -> Outcomes:
    """Maps the outcomes in a directory, if they belong to some rows.

    Args:
        teacher: The directory.
        settings: Values of `taught_settings` of the run.
        rows: Rows that the run reads.

    Raises:
        DataError: The outcomes are incomplete, damaged, or of other data or settings.
    """
    path, origin = local_path(_FIELD, teacher), read_origin(teacher, settings)
    _check_same(origin, _content_of(rows), path)
    directory = pathlib.Path(path)
    if missing := _missing(directory, origin):
        problem = f"lacks {len(missing):,} of {len(origin.parts):,} parts"
        remedy = "run `zjax data teach` as before, which goes on"
        raise DataError(Problem(_FIELD, path, problem, remedy))
    numbers = _map(directory / _ROWS_NAME, "int64", origin.num_rows)[:]
    row_bytes = origin.length * origin.record.itemsize
    parts = [
        _map(_part_path(directory, number), "uint8", len(places) * row_bytes)
        for number, places in enumerate(origin.parts)
    ]
    return Outcomes(path, origin, numbers.astype(np.int64), tuple(parts))


def _map(path: pathlib.Path, dtype: str, size: int) -> store.MappedTokens:
    """Maps a file of `size` numbers, which are verified as they are read."""
    fault, num_bytes = find_fault(path), size * np.dtype(dtype).itemsize
    if not fault and path.stat().st_size != num_bytes:
        fault = f"holds {path.stat().st_size} bytes, but {ORIGIN_NAME} says {num_bytes}"
    if fault:
        raise DataError(Problem(_FIELD, str(path), fault, _AGAIN))
    return store.MappedTokens(path, dtype, True, _FIELD)


def _check_same(origin: Origin, wanted: dict[str, Any], path: str) -> None:
    """Refuses settings that differ from the settings of stored outcomes."""
    saved, problems = origin.settings, []
    for name in wanted:
        if saved.get(name) != wanted[name]:
            problem = f"was {saved.get(name)!r} when distill.teacher={path!r} was "
            remedy = f"restore it, or {_AGAIN}"
            problems.append(Problem(name, wanted[name], f"{problem}written", remedy))
    if problems:
        raise DataError(*problems)


@dataclasses.dataclass(frozen=True)
class TaughtRows:
    """Rows with stored outcomes of a teacher."""

    rows: Rows
    outcomes: Outcomes

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, indices: Int64[np.ndarray, " n"], /) -> dict[str, np.ndarray]:
        """Reads rows and outcomes."""
        return self.rows.read(indices) | self.outcomes.read(indices)

    def digest(self) -> str:
        """Checksum of the rows."""
        return self.rows.digest()


@dataclasses.dataclass(frozen=True)
class TaughtDraws:
    """Draws rows with outcomes of a teacher in the first steps."""

    draws: Draws
    outcomes: Outcomes
    num_steps: int
    """Steps of the stage of distillation."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of rows that batches can have."""
        return self.draws.sizes

    def draw(self, step: int) -> Draw:
        """Draws the rows of a step, from 0 on."""
        drawn = self.draws.draw(step)
        if step >= self.num_steps:
            return drawn
        return Draw(TaughtRows(drawn.rows, self.outcomes), drawn.indices)
