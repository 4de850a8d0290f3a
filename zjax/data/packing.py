"""Rows of equal length from a stream of tokens, readable by number.

Blocks split the stream without regard to documents. Documents are packed whole, several
to a row, with segment ids that confine attention. The index of pieces per row is
computed once, by first-fit in windows of documents, all windows in lockstep.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int, Int64

from zjax.data.sums import digest_tokens, token_parts

WINDOW_ROWS = 128
"""Rows that a first-fit window fills, about."""
# Bounds the time: each document of a window is compared with all open rows.
MAX_WINDOW_DOCUMENTS = 4_096
ANSWER_BLOCK = 1 << 22
"""Tokens in which answers are searched at a time."""
NO_ANSWER = np.iinfo(np.int64).max


@runtime_checkable
class TokenArray(Protocol):
    """Unsigned token ids that are sliced without reading the whole stream."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> np.ndarray: ...


@runtime_checkable
class Rows(Protocol):
    """Rows of a fixed shape, read by number."""

    def __len__(self) -> int: ...

    def read(self, indices: Int64[np.ndarray, " n"], /) -> dict[str, np.ndarray]:
        """Stacks the rows `indices` along a first dim, one array per field."""
        ...

    def digest(self) -> str:
        """Checksum of the data; see `zjax.data.sums`."""
        ...


class BlockRows:
    """Stream split into rows; the last target of a row begins the next row."""

    def __init__(self, tokens: TokenArray, length: int):
        self._tokens = tokens
        self._length = length

    def __len__(self) -> int:
        return max(0, len(self._tokens) - 1) // self._length

    def read(self, indices: Int64[np.ndarray, " n"], /) -> dict[str, np.ndarray]:
        """Reads `tokens`, `targets` (int32) and `weights` (float32, all 1)."""
        starts = (indices * self._length).tolist()
        windows = np.stack(
            [self._tokens[start : start + self._length + 1] for start in starts]
        ).astype(np.int32)
        return {
            "tokens": windows[:, :-1],
            "targets": windows[:, 1:],
            "weights": np.ones((len(indices), self._length), np.float32),
        }

    def digest(self) -> str:
        """Checksum of the token stream."""
        return digest_tokens(self._tokens)


class DocumentRows:
    """Documents packed into rows; long documents are split into pieces of a row.

    Targets stay within a document: the last token, and padding, have weight 0. Padding
    has segment 0 and token 0. Long conversations are cut instead, as an answer behind
    the cut would have no prompt, and left out without an answer before the cut.

    Args:
        offsets: Start of each document, and the end of the last.
        answers: Flags, 1 for each token with a loss; None if all tokens have one.

    Attributes:
        num_cut: Number of conversations that are longer than a row.
        num_left_out: Number of conversations that have no loss within a row.
    """

    def __init__(
        self,
        tokens: TokenArray,
        offsets: Int64[np.ndarray, " offsets"],
        length: int,
        answers: TokenArray | None = None,
    ):
        self._tokens = tokens
        self._answers = answers
        self._offsets = offsets
        self._length = length
        self.num_cut = self.num_left_out = 0
        starts, sizes, ends_document = split_documents(offsets, length)
        if answers is not None:
            offsets = np.unique(offsets)  # without documents of no token
            has_loss = first_answers(answers, offsets) <= length
            self.num_cut = int((np.diff(offsets) > length).sum())
            self.num_left_out = int((~has_loss).sum())
            kept = np.append(True, ends_document)[:-1]  # first piece of each document
            kept[kept] = has_loss
            starts, sizes, ends_document = (
                column[kept] for column in (starts, sizes, ends_document)
            )
        rows = pack_first_fit(sizes, length)
        # Sorted by row, so that the pieces of a row are one slice.
        order = np.argsort(rows, kind="stable")
        self._starts, self._sizes, self._closes = (
            column[order] for column in (starts, sizes, ends_document)
        )
        num_rows = int(rows.max()) + 1 if len(rows) else 0
        self._first_piece = np.searchsorted(rows[order], np.arange(num_rows + 1))

    def __len__(self) -> int:
        return len(self._first_piece) - 1

    def read(self, indices: Int64[np.ndarray, " n"], /) -> dict[str, np.ndarray]:
        """Reads `tokens, targets, segment_ids, positions` (int32) and `weights`."""
        batch = self._stack(self._tokens, indices)
        if self._answers is not None:
            # A target has a loss if it is a token of an answer.
            batch["weights"] *= self._stack(self._answers, indices)["targets"]
        return batch

    def digest(self) -> str:
        """Checksum of the token stream, the document boundaries and the answers."""
        answers = () if self._answers is None else token_parts(self._answers)
        return digest_tokens(self._tokens, self._offsets, *answers)

    def _stack(
        self, stream: TokenArray, indices: Int64[np.ndarray, " n"]
    ) -> dict[str, np.ndarray]:
        rows = [self._pieces(stream, row) for row in indices.tolist()]
        return stack_pieces(rows, self._length)

    def _pieces(self, stream: TokenArray, row: int) -> list[tuple[np.ndarray, bool]]:
        """Reads the pieces of a row."""
        pieces = slice(self._first_piece[row], self._first_piece[row + 1])
        return [
            # A piece inside a document has one more token, the last target.
            (stream[start : start + size + (not ends_document)], ends_document)
            for start, size, ends_document in zip(
                self._starts[pieces].tolist(),
                self._sizes[pieces].tolist(),
                self._closes[pieces].tolist(),
                strict=True,
            )
        ]


def stack_pieces(
    rows: Sequence[Sequence[tuple[np.ndarray, bool]]], length: int
) -> dict[str, np.ndarray]:
    """Concatenates pieces of documents into rows of `length` tokens.

    A piece is a pair of tokens and whether the document ends there. A piece that does
    not end a document has one more token, the last target.
    """
    names = ("tokens", "targets", "segment_ids", "positions")
    batch = {name: np.zeros((len(rows), length), np.int32) for name in names}
    weights = np.zeros((len(rows), length), np.float32)
    for row, pieces in enumerate(rows):
        position = 0
        for segment, (piece, ends_document) in enumerate(pieces, start=1):
            size = len(piece) if ends_document else len(piece) - 1
            span = slice(position, position + size)
            predicted = slice(position, position + len(piece) - 1)
            batch["tokens"][row, span] = piece[:size]
            batch["targets"][row, predicted] = piece[1:]
            weights[row, predicted] = 1.0
            batch["segment_ids"][row, span] = segment
            batch["positions"][row, span] = np.arange(size)
            position += size
    return batch | {"weights": weights}


def split_documents(
    offsets: Int64[np.ndarray, " offsets"], length: int
) -> tuple[
    Int64[np.ndarray, " pieces"],
    Int64[np.ndarray, " pieces"],
    Bool[np.ndarray, " pieces"],
]:
    """Splits every document into pieces of at most `length` tokens.

    Returns start and size of each piece, and whether the document ends there.
    """
    ends = offsets[1:]
    counts = -(-np.diff(offsets) // length)
    first_piece = np.cumsum(counts) - counts
    within = np.arange(counts.sum()) - np.repeat(first_piece, counts)
    starts = np.repeat(offsets[:-1], counts) + within * length
    sizes = np.minimum(length, np.repeat(ends, counts) - starts)
    return starts, sizes, starts + sizes == np.repeat(ends, counts)


def first_answers(
    answers: TokenArray, offsets: Int64[np.ndarray, " offsets"]
) -> Int64[np.ndarray, " documents"]:
    """Position of the first target with a loss in each document, or NO_ANSWER.

    Example:
        >>> answers = np.array([1, 0, 1, 1, 0, 1], np.uint8)
        >>> first_answers(answers, np.array([0, 4, 6])).tolist()
        [2, 1]
    """
    found = np.full(len(offsets) - 1, NO_ANSWER)
    for start in range(0, len(answers), ANSWER_BLOCK):
        part = answers[start : start + ANSWER_BLOCK]
        positions = np.flatnonzero(part) + start
        documents = np.searchsorted(offsets, positions, side="right") - 1
        within = positions - offsets[documents]
        # The first token of a document is no target.
        is_target = within > 0
        # Unbuffered, as several positions may lie in one document.
        np.minimum.at(found, documents[is_target], within[is_target])
    return found


def pack_first_fit(
    sizes: Int[np.ndarray, " pieces"], length: int
) -> Int64[np.ndarray, " pieces"]:
    """Assigns a row, numbered without gaps, to each piece of 1 to `length` tokens.

    Pieces of a full row come first. Shorter pieces are taken in windows; within a
    window, from the longest to the shortest, each piece goes to the first row with
    enough space.

    Example:
        >>> pack_first_fit(np.array([2, 4, 3, 1, 2]), length=4).tolist()
        [2, 0, 1, 1, 2]
    """
    rows = np.zeros(len(sizes), np.int64)
    full = sizes == length
    num_full = int(full.sum())
    rows[full] = np.arange(num_full)
    shorter = np.flatnonzero(~full)
    if len(shorter) == 0:
        return rows
    width = _window_documents(sizes[shorter], length)
    table = np.zeros((-(-len(shorter) // width), width), np.int64)
    table.reshape(-1)[: len(shorter)] = sizes[shorter]
    # Longest first, which fills rows best; the padding of the last window comes last.
    order = np.argsort(-table, axis=1, kind="stable")
    placed, num_used = _fit_windows(np.take_along_axis(table, order, axis=1), length)
    # Rows of a window follow the rows of all windows before.
    placed += (np.cumsum(num_used) - num_used)[:, None]
    result = np.empty_like(placed)
    np.put_along_axis(result, order, placed, axis=1)
    rows[shorter] = num_full + result.reshape(-1)[: len(shorter)]
    return rows


def _window_documents(sizes: Int[np.ndarray, " pieces"], length: int) -> int:
    width = int(WINDOW_ROWS * length // sizes.mean())
    return min(max(width, 1), MAX_WINDOW_DOCUMENTS, len(sizes))


def _fit_windows(
    sizes: Int64[np.ndarray, "windows width"], length: int
) -> tuple[Int64[np.ndarray, "windows width"], Int64[np.ndarray, " windows"]]:
    """Runs first-fit in each window; pieces of size 0 are padding and open no row."""
    num_windows, width = sizes.shape
    windows = np.arange(num_windows)
    space = np.full((num_windows, width), length, np.int64)
    placed = np.zeros_like(sizes)
    num_used = np.zeros(num_windows, np.int64)
    for column in range(width):
        size = sizes[:, column]
        # Rows in use and one empty row: a piece always fits there.
        num_open = min(int(num_used.max()) + 1, width)
        # argmax finds the first row with enough space.
        row = (space[:, :num_open] >= size[:, None]).argmax(axis=1)
        space[windows, row] -= size
        placed[:, column] = row
        num_used = np.maximum(num_used, np.where(size > 0, row + 1, 0))
    return placed, num_used
