"""Token files: a directory whose streams are memory-mapped.

meta.json                sizes, dtype and vocabulary tokenizer.json           the
tokenizer, unless it is bytes train.bin                token ids, little-endian uint16
or uint32 train.idx                int64: start of each document, and the end of the
last train.answers            uint8: 1 for tokens of answers, if only these have a loss
validation.*             the same for held-out documents, if there are any
"""

import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

import numpy as np
from jaxtyping import Int64

from zjax.config.vocabulary import META_NAME
from zjax.data import digest
from zjax.data import tokenizer as text
from zjax.errors import DataError, Problem
from zjax.reading import parse_json, read_text
from zjax.remedies import find_remedy

FORMAT = 1
TOKENIZER_NAME = "tokenizer.json"


MAX_BYTES = 1 << 60
"""Largest plausible size of a stream."""


@dataclasses.dataclass(frozen=True)
class Split:
    """Size of one stream."""

    num_tokens: int
    num_documents: int


@dataclasses.dataclass(frozen=True)
class Meta:
    """Content of `meta.json`."""

    tokenizer: str
    """`bytes`, or `tokenizer.json` beside it."""
    vocab_size: int
    end_id: int
    dtype: str
    """`uint16` or `uint32`."""
    splits: dict[str, Split]
    has_answers: bool = False
    """Whether only the tokens of answers have a loss."""


class MappedTokens:
    """Memory-mapped token ids; pickled as the name of the file.

    Args:
        path: Path of the file, not empty.
        dtype: `uint8`, `uint16` or `uint32`.
    """

    def __init__(self, path: pathlib.Path, dtype: str):
        self._source = path, dtype
        self._array = np.memmap(path, np.dtype(dtype).newbyteorder("<"), "r")

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: slice, /) -> np.ndarray:
        return self._array[index]

    def __reduce__(self):
        return MappedTokens, self._source


@dataclasses.dataclass(frozen=True)
class Store:
    """One opened stream of tokens, and its documents."""

    name: str
    """Name of the file or source, for messages."""
    tokens: np.ndarray | MappedTokens
    offsets: Int64[np.ndarray, " offsets"]
    """Start of each document, and the end of the last."""
    vocab_size: int
    answers: MappedTokens | None = None
    """1 for each token of an answer; None where all tokens have a loss."""


class SplitWriter:
    """Appends documents to `<split>.bin` and `<split>.idx` of a directory."""

    def __init__(self, directory: pathlib.Path, split: str, dtype: str):
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._tokens = open(directory / f"{split}.bin", "wb")
        self._offsets = open(directory / f"{split}.idx", "wb")
        self._offsets.write(np.zeros(1, "<i8").tobytes())
        self._answers = directory / f"{split}.answers"
        self.num_tokens = 0
        self.num_documents = 0

    def append(self, ids: np.ndarray, end_id: int) -> None:
        """Writes the ids of one document, and its end token."""
        self._tokens.write(np.append(ids, end_id).astype(self._dtype).tobytes())
        self.num_tokens += len(ids) + 1
        self.num_documents += 1
        self._offsets.write(np.array(self.num_tokens, "<i8").tobytes())

    def append_answers(self, ids: np.ndarray, answers: np.ndarray) -> None:
        """Writes the ids of one conversation, and which belong to answers."""
        self._tokens.write(ids.astype(self._dtype).tobytes())
        with self._answers.open("ab") as file:
            file.write(answers.astype(np.uint8).tobytes())
        self.num_tokens += len(ids)
        self.num_documents += 1
        self._offsets.write(np.array(self.num_tokens, "<i8").tobytes())

    def close(self) -> None:
        """Flushes everything to disk."""
        with self._tokens, self._offsets:  # closes both also where the disk is full
            for file in (self._tokens, self._offsets):
                file.flush()
                os.fsync(file.fileno())


def write_meta(directory: pathlib.Path, meta: Meta) -> None:
    """Writes `meta.json`."""
    content = {"format": FORMAT} | dataclasses.asdict(meta)
    (directory / META_NAME).write_text(json.dumps(content, indent=2) + "\n")


def read_meta(path: str) -> Meta:
    """Reads `meta.json` of a directory made by `zjax data prepare`.

    Raises:
        DataError: It is missing or invalid.
    """
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
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        problem = f"has a {META_NAME} that is not of format {FORMAT}"
        raise DataError(Problem("data.path", path, problem, remedy))
    if not _is_valid(content):
        raise DataError(Problem("data.path", path, f"has a broken {META_NAME}", remedy))
    splits = {name: Split(**sizes) for name, sizes in content.pop("splits").items()}
    return Meta(splits=splits, **content)


def _is_valid(content: dict[str, Any]) -> bool:
    names = {field.name for field in dataclasses.fields(Meta)}
    if content.keys() | {"has_answers"} != names:
        return False
    splits = content["splits"]
    sizes = {field.name for field in dataclasses.fields(Split)}
    if not isinstance(splits, dict) or not all(
        isinstance(split, dict) and split.keys() == sizes for split in splits.values()
    ):
        return False
    counts = [size for split in splits.values() for size in split.values()]
    return (
        content["tokenizer"] in ("bytes", TOKENIZER_NAME)
        and content["dtype"] in ("uint16", "uint32")
        and all(type(n) is int and 0 < n < MAX_BYTES for n in counts)
        and type(content["vocab_size"]) is int
        and 0 < content["vocab_size"] <= text.MAX_VOCAB
        and type(content.get("has_answers", False)) is bool
        and type(content["end_id"]) is int
        and 0 <= content["end_id"] < content["vocab_size"]
    )


def open_store(path: str, split: str) -> Store:
    """Maps the stream of a split of a directory made by `zjax data prepare`.

    Raises:
        DataError: The directory is not a store, lacks the split, is truncated, or has
            ids beyond its vocabulary.
    """
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
    item_bytes = np.dtype(meta.dtype).itemsize
    index = file.with_suffix(".idx")
    _check_size(file, sizes.num_tokens * item_bytes)
    _check_size(index, (sizes.num_documents + 1) * 8)
    if meta.has_answers:
        _check_size(file.with_suffix(".answers"), sizes.num_tokens)
    try:
        tokens = MappedTokens(file, meta.dtype)
        largest = largest_id(tokens)
        offsets = np.fromfile(index, "<i8").astype(np.int64)
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
    answers = None
    if meta.has_answers:
        answers = MappedTokens(file.with_suffix(".answers"), "uint8")
    return Store(str(file), tokens, offsets, meta.vocab_size, answers)


def open_tokenizer(path: str) -> text.Tokenizer:
    """Opens the tokenizer of a directory made by `zjax data prepare`."""
    meta = read_meta(path)
    if meta.tokenizer == "bytes":
        return text.make_bytes()
    return text.load_tokenizer(pathlib.Path(path) / TOKENIZER_NAME)


def digest_tokenizer(path: str) -> str:
    """Checksum of the tokenizer of a directory made by `zjax data prepare`."""
    meta = read_meta(path)
    is_file = meta.tokenizer != "bytes"
    content = text.read_file(pathlib.Path(path) / TOKENIZER_NAME) if is_file else b""
    checksum = hashlib.sha256(f"{meta.vocab_size} {meta.end_id} ".encode() + content)
    return checksum.hexdigest()[:16]


def largest_id(tokens: np.ndarray | MappedTokens) -> int:
    """The largest id of a stream, or of 64 equally spaced parts of a long one."""
    return max(int(part.max()) for part in digest.token_parts(tokens))


def _check_size(file: pathlib.Path, expected_bytes: int) -> None:
    state = f"holds {file.stat().st_size} bytes" if file.is_file() else "is missing"
    if state == f"holds {expected_bytes} bytes":
        return
    problem = f"{state}, but {META_NAME} says {expected_bytes}"
    raise DataError(Problem("data.path", str(file), problem, "prepare it again"))
