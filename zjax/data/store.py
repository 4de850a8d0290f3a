"""Token files: a directory of memory-mapped token streams.

- `meta.json`: sizes, dtype, and the record of the tokenizer
- `tokenizer.json` and the files beside it in a checkpoint, unless it is `bytes`
- `train.bin`: token ids, little-endian uint16 or uint32
- `train.idx`: int64, start of each document, and the end of the last
- `train.answers`: uint8, 1 for tokens of answers, if only answers have a loss
- `train.examples`: int64, first document of each example, and the end of the last, if
  documents are completions that were compared or labelled
- `train.labels`: uint8, 1 for each example with a desirable completion, if labelled
- `validation.*`: files of held-out documents, if there are any
- `*.sums`: checksums of each file, by chunk
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import crc32c
import numpy as np
from absl import logging
from jaxtyping import Int64, UInt8

from zjax.data import sums
from zjax.data import tokenizer as text
from zjax.data.examples import COMPARED, LABELS, RANKED
from zjax.data.sums import REMEDY, ChunkSums, SummedFile
from zjax.data.tokenizer_files import KEY, TOKENIZER_NAME, TokenizerRecord
from zjax.errors import DataError, Problem, find_remedy
from zjax.files import META_NAME, parse_json, read_text

FORMAT = 2
EARLIER_FORMAT = 1
"""Format without a tokenizer record and checksums, which is still read."""
SUM_KEY = "checksum"
"""Key of `meta.json` with the CRC-32C of all other keys."""
MAX_BYTES = 1 << 60


@dataclasses.dataclass(frozen=True)
class Split:
    """Numbers of tokens, documents and examples of one stream."""

    num_tokens: int
    num_documents: int
    num_examples: int = 0
    """0 if documents are no parts of examples."""


@dataclasses.dataclass(frozen=True)
class Meta:
    """Content of `meta.json`."""

    tokenizer: TokenizerRecord
    dtype: str
    """Dtype of the token ids, `uint16` or `uint32`."""
    splits: dict[str, Split]
    has_answers: bool = False
    """Whether only the tokens of answers have a loss."""
    examples: str = ""
    """Kind of the examples, one of `COMPARED`; empty if documents are texts."""
    format: int = FORMAT

    @property
    def vocab_size(self) -> int:
        """Largest id of the tokenizer, plus 1."""
        return self.tokenizer.vocab_size


class MappedTokens:
    """A memory-mapped stream; pickled as the path of the file.

    Args:
        dtype: Name of the dtype: `uint8`, `uint16`, `uint32` or `int64`.
        has_sums: Whether reads are verified by the checksums beside the file.
        field: Setting that names the file, for errors.

    Raises:
        DataError: The checksums cannot be used; at an access, a chunk is damaged.
    """

    def __init__(
        self,
        path: pathlib.Path,
        dtype: str,
        has_sums: bool,
        field: str = "data.path",
    ):
        self._source = path, dtype, has_sums, field
        self._array = np.memmap(path, np.dtype(dtype).newbyteorder("<"), "r")
        content = self._array.view(np.uint8)
        self._sums = ChunkSums(path, content, field) if has_sums else None

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: slice, /) -> np.ndarray:
        # Verified as chunks are read: checking whole files would delay the start.
        if self._sums is not None:
            start, stop, _ = index.indices(len(self._array))
            item_bytes = self._array.itemsize
            self._sums.verify(start * item_bytes, stop * item_bytes)
        return self._array[index]

    # Worker processes map the file instead of receiving tokens.
    def __reduce__(self):
        return MappedTokens, self._source


@dataclasses.dataclass(frozen=True)
class Store:
    """One opened stream of tokens, with document boundaries."""

    name: str
    """Name of the file or source, for messages."""
    tokens: np.ndarray | MappedTokens
    offsets: Int64[np.ndarray, " offsets"]
    """Start of each document, and the end of the last."""
    vocab_size: int
    answers: MappedTokens | None = None
    """Flags, 1 for each token of an answer; None if all tokens have a loss."""
    examples: Int64[np.ndarray, " examples"] | None = None
    """First document of each example, and the end of the last; None without."""
    labels: UInt8[np.ndarray, " labels"] | None = None
    """1 for each example with a desirable completion; None without labels."""
    kind: str = ""
    """Kind of the examples, one of `COMPARED`; empty without."""


class SplitWriter:
    """Appends documents to `<split>.bin` and `<split>.idx` of a directory.

    Args:
        dtype: Name of the dtype of ids, `uint16` or `uint32`.
        answers: Whether documents are conversations, added by `append_answers`.
        examples: Kind of the examples, added by `append_example`; empty without.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        split: str,
        dtype: str,
        answers: bool = False,
        examples: str = "",
    ):
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._tokens = SummedFile(directory / f"{split}.bin")
        self._offsets = SummedFile(directory / f"{split}.idx")
        self._offsets.write(np.zeros(1, "<i8").tobytes())  # start of document 0
        self._answers = SummedFile(directory / f"{split}.answers") if answers else None
        self._examples = self._labels = None
        if examples:
            self._examples = SummedFile(directory / f"{split}.examples")
            self._examples.write(np.zeros(1, "<i8").tobytes())  # start of example 0
        if examples == LABELS:
            self._labels = SummedFile(directory / f"{split}.labels")
        self.num_tokens = self.num_documents = self.num_examples = 0
        self._document_start = 0

    @property
    def sizes(self) -> Split:
        """Numbers of tokens, documents and examples so far."""
        return Split(self.num_tokens, self.num_documents, self.num_examples)

    def append(self, ids: np.ndarray) -> None:
        """Writes ids of the current document."""
        self._tokens.write(ids.astype(self._dtype).tobytes())
        self.num_tokens += len(ids)

    def end_document(self) -> None:
        """Ends a document, or does nothing without tokens."""
        if self.num_tokens > self._document_start:
            self.num_documents += 1
            self._document_start = self.num_tokens
            self._offsets.write(np.array(self.num_tokens, "<i8").tobytes())

    def append_answers(self, ids: np.ndarray, answers: np.ndarray) -> None:
        """Writes the ids of one conversation, and flags of the answers."""
        assert self._answers is not None
        self._answers.write(answers.astype(np.uint8).tobytes())
        self.append(ids)
        self.end_document()

    def append_example(
        self, sequences: Iterable[tuple[np.ndarray, np.ndarray]], label: bool | None
    ) -> None:
        """Writes ids and answers of the sequences of one example, and the label."""
        assert self._examples is not None
        for ids, answers in sequences:
            self.append_answers(ids, answers)
        self.num_examples += 1
        self._examples.write(np.array(self.num_documents, "<i8").tobytes())
        if self._labels is not None:
            self._labels.write(bytes([bool(label)]))

    def close(self) -> None:
        """Syncs all files to disk, and writes the checksums."""
        files = self._tokens, self._offsets, self._answers, self._examples, self._labels
        with contextlib.ExitStack() as stack:  # closes all, even if the disk is full
            for file in files:
                if file is not None:
                    stack.callback(file.close)


def sum_of(content: Mapping[str, Any]) -> int:
    """Computes the CRC-32C of JSON values, in any layout of the file."""
    return crc32c.crc32c(json.dumps(content, sort_keys=True).encode())


def write_meta(directory: pathlib.Path, meta: Meta) -> None:
    """Writes `meta.json`."""
    content = dataclasses.asdict(meta) | {KEY: meta.tokenizer.to_mapping()}
    content[SUM_KEY] = sum_of(content)
    (directory / META_NAME).write_text(json.dumps(content, indent=2) + "\n")


def read_meta(path: str) -> Meta:
    """Reads `meta.json` of a directory made by `zjax data prepare`."""
    remedy = "give a directory made by `zjax data prepare`"
    try:
        content = parse_json(read_text(pathlib.Path(path) / META_NAME))
    except (FileNotFoundError, NotADirectoryError) as error:
        problem = Problem("data.path", path, f"holds no {META_NAME}", remedy)
        raise DataError(problem) from error
    except OSError as error:
        problem = f"has a {META_NAME} that cannot be read ({error.strerror or error})"
        remedy = find_remedy(error, default=remedy)
        raise DataError(Problem("data.path", path, problem, remedy)) from error
    except ValueError as error:
        problem = Problem("data.path", path, f"has a broken {META_NAME}", remedy)
        raise DataError(problem) from error
    found = content.get("format") if isinstance(content, dict) else None
    if found not in (FORMAT, EARLIER_FORMAT):
        problem = f"has a {META_NAME} that is not of format {FORMAT}"
        raise DataError(Problem("data.path", path, problem, remedy))
    if found == FORMAT and content.pop(SUM_KEY, None) != sum_of(content):
        problem = f"has a {META_NAME} that does not match its checksum"
        raise DataError(Problem("data.path", path, problem, REMEDY))
    try:
        if found == EARLIER_FORMAT:
            content = _with_record(path, content)
        record = TokenizerRecord.from_mapping(content.pop(KEY, None))
        _check_meta(content)
    except DataError:  # of the tokenizer; a DataError is a ValueError, too
        raise
    except (KeyError, TypeError, ValueError) as error:
        problem = Problem("data.path", path, f"has a broken {META_NAME}", remedy)
        raise DataError(problem) from error
    splits = {name: Split(**sizes) for name, sizes in content.pop("splits").items()}
    return Meta(tokenizer=record, splits=splits, **content)


def _with_record(path: str, content: dict[str, Any]) -> dict[str, Any]:
    """Adds a tokenizer record to the `meta.json` of the earlier format."""
    _warn_of_format(path)
    content = dict(content)
    size, end_id = content.pop("vocab_size"), content.pop("end_id")
    if (kind := content["tokenizer"]) == "bytes":
        record = text.make_bytes().record
    elif kind == TOKENIZER_NAME:
        record = text.load_tokenizer(pathlib.Path(path) / TOKENIZER_NAME).record
        # Texts of the earlier format have no BOS, and one end token.
        record = dataclasses.replace(record, bos_id=None, end_ids=(end_id,))
    else:
        raise ValueError(f"{kind} is no tokenizer")
    if size != record.vocab_size:
        raise ValueError(f"{size} is not the size of the vocabulary")
    return content | {KEY: record.to_mapping()}


@functools.cache
def _warn_of_format(path: str) -> None:
    """Warns once of a directory of the earlier format."""
    logging.warning(
        "data.path=%r was prepared by an earlier zjax: it has no record of the "
        "tokens that begin and end texts, no chat template and no checksums; prepare "
        "it again with `zjax data prepare` for a new run, and keep it for runs that "
        "have started with it",
        path,
    )


def _check_meta(content: dict[str, Any]) -> None:
    """Raises ValueError if `meta.json` has other fields or values out of range."""
    splits = content["splits"]
    sizes = {field.name for field in dataclasses.fields(Split)}
    optional = {"has_answers", "examples"}
    kind = content.get("examples", "")
    counts = {"num_examples"}
    is_valid = (
        content.keys() | optional == {"splits", "dtype", "format", *optional}
        and isinstance(splits, dict)
        and all(
            isinstance(x, dict) and x.keys() | counts == sizes for x in splits.values()
        )
        and all(
            # By type, as True is an int, too.
            type(n) is int and bool(kind or name not in counts) <= n < MAX_BYTES
            for split in splits.values()
            for name, n in split.items()
        )
        and kind in ("", *COMPARED)
        and content["dtype"] in ("uint16", "uint32")
        and type(content.get("has_answers", False)) is bool
    )
    if not is_valid:
        raise ValueError(f"{META_NAME} has other fields, or values out of range")


def open_store(path: str, split: str) -> Store:
    """Maps the stream of a split of a directory made by `zjax data prepare`."""
    meta = read_meta(path)
    if split not in meta.splits:
        raise DataError(
            Problem(
                "data.path",
                path,
                f"has no {split} split",
                "prepare it again with a larger validation_fraction",
            )
        )
    sizes = meta.splits[split]
    file = pathlib.Path(path) / f"{split}.bin"
    index, answers = file.with_suffix(".idx"), file.with_suffix(".answers")
    # A truncated file would be mapped as a shorter stream.
    _check_size(file, sizes.num_tokens * np.dtype(meta.dtype).itemsize)
    _check_size(index, (sizes.num_documents + 1) * 8)
    if meta.has_answers:
        _check_size(answers, sizes.num_tokens)
    has_sums = meta.format != EARLIER_FORMAT
    try:
        tokens = MappedTokens(file, meta.dtype, has_sums)
        # An id beyond the vocabulary would index an embedding out of range.
        largest = largest_id(tokens)
        offsets = MappedTokens(index, "int64", has_sums)[:].astype(np.int64)
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})"
        remedy = "check the file and its disk"
        raise DataError(Problem("data.path", str(file), problem, remedy)) from error
    if largest >= meta.vocab_size:
        problem = (
            f"holds token id {largest}, beyond its vocabulary of {meta.vocab_size}"
        )
        raise DataError(Problem("data.path", str(file), problem, "prepare it again"))
    ends = int(offsets[0]), int(offsets[-1])
    if ends != (0, sizes.num_tokens) or np.any(offsets[1:] <= offsets[:-1]):
        problem = f"does not cut {sizes.num_tokens} tokens into documents"
        raise DataError(Problem("data.path", str(index), problem, "prepare it again"))
    trained = MappedTokens(answers, "uint8", has_sums) if meta.has_answers else None
    examples, labels = _open_examples(file, meta.examples, sizes)
    return Store(
        str(file),
        tokens,
        offsets,
        meta.vocab_size,
        trained,
        examples,
        labels,
        meta.examples,
    )


def _open_examples(
    file: pathlib.Path, kind: str, sizes: Split
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Reads the first documents and the labels of examples; None of what is not."""
    if not kind:
        return None, None
    starts = _read_numbers(file.with_suffix(".examples"), "int64", sizes.num_examples)
    counts = np.diff(starts)
    is_whole = starts[0] == 0 and starts[-1] == sizes.num_documents
    # Pairs, and labelled completions, have two documents each.
    if not is_whole or counts.min() < 2 or (kind != RANKED and counts.max() > 2):
        problem = f"does not join {sizes.num_documents} documents as {kind}"
        place = str(file.with_suffix(".examples"))
        raise DataError(Problem("data.path", place, problem, "prepare it again"))
    if kind != LABELS:
        return starts, None
    return starts, _read_numbers(
        file.with_suffix(".labels"), "uint8", sizes.num_examples - 1
    )


def _read_numbers(path: pathlib.Path, dtype: str, last: int) -> np.ndarray:
    """Reads and verifies a file of `last + 1` numbers."""
    _check_size(path, (last + 1) * np.dtype(dtype).itemsize)
    try:
        return MappedTokens(path, dtype, True)[:].astype(dtype)
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})"
        remedy = "check the file and its disk"
        raise DataError(Problem("data.path", str(path), problem, remedy)) from error


def open_tokenizer(path: str) -> text.Tokenizer:
    """Opens the tokenizer of a directory made by `zjax data prepare`."""
    record = read_meta(path).tokenizer
    if record.name == "bytes":
        return text.make_bytes()
    if record.name == text.NUMBERS:
        return text.make_numbers(record.vocab_size)
    return text.load_tokenizer(pathlib.Path(path) / TOKENIZER_NAME, record)


def digest_tokenizer(path: str) -> str:
    """Hashes the `tokenizer.json` of a directory made by `zjax data prepare`.

    The position in a checkpoint holds this hash, to tell the rows of one directory from
    another. The digest of the record hashes the meaning of ids instead.
    """
    record = read_meta(path).tokenizer
    is_file = record.name not in ("bytes", text.NUMBERS)
    content = text.read_file(pathlib.Path(path) / TOKENIZER_NAME) if is_file else b""
    sizes = f"{record.vocab_size} {next(iter(record.end_ids), None)} "
    return hashlib.sha256(sizes.encode() + content).hexdigest()[:16]


def largest_id(tokens: np.ndarray | MappedTokens) -> int:
    """Largest id of a stream, or of 64 equally spaced parts of a long stream."""
    return max(int(part.max()) for part in sums.token_parts(tokens))


def _check_size(file: pathlib.Path, expected_bytes: int) -> None:
    """Refuses a file that is missing or of another size."""
    state = f"holds {file.stat().st_size} bytes" if file.is_file() else "is missing"
    if state == f"holds {expected_bytes} bytes":
        return
    problem = f"{state}, but {META_NAME} says {expected_bytes}"
    raise DataError(Problem("data.path", str(file), problem, "prepare it again"))
