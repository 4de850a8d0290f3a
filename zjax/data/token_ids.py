"""Token ids of another program: `input_ids` and `labels`, or a file of nanoGPT.

Such ids are written as they are, without a BOS or an end token of their own.
"""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from zjax.data.conversations import refuse
from zjax.typing import IGNORED

LABELS, MASK = "labels", "attention_mask"
"""Columns that are read beside a column of ids."""
STREAM_SUFFIX = ".bin"
"""Suffix of a stream of little-endian uint16, as nanoGPT writes."""
BLOCK_TOKENS = 1 << 15


class TokenIds(NamedTuple):
    """Ids of one document.

    Args:
        ids: int64[n].
        answers: uint8[n], 1 for tokens with a loss; None if all have one.
    """

    ids: np.ndarray
    answers: np.ndarray | None = None


def read_ids(
    record: Mapping[str, Any], field: str, path: pathlib.Path, where: str
) -> TokenIds:
    """Reads the ids of a record, without the tokens that `attention_mask` leaves out.

    Raises:
        DataError: They are no list of ids, or `labels` are not these ids or -100.

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
    if found.size == 0 and found.ndim == 1:
        return np.zeros(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        problem = f"has no list of integers as {field!r}"
        refuse(path, where, problem, "write token ids, or text")
    return found.astype(np.int64)


def read_stream(path: pathlib.Path) -> Iterator[np.ndarray]:
    """Reads a stream of ids in blocks.

    Raises:
        DataError: The file has an odd number of bytes.
    """
    if path.stat().st_size % 2:
        problem, remedy = "has an odd number of bytes", "give little-endian uint16"
        refuse(path, "its stream", problem, remedy)
    with open(path, "rb") as file:
        while content := file.read(2 * BLOCK_TOKENS):
            yield np.frombuffer(content, "<u2").astype(np.int64)
