"""Token files: a directory whose streams are mapped into memory, never read whole.

meta.json                what follows, and the vocabulary
tokenizer.json           the vocabulary, unless it is bytes
train.bin                token ids, little-endian uint16 or uint32
train.idx                int64: where each document starts, and the end of the last
validation.bin, .idx     the same for held-out documents, unless there are none
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


MOST_BYTES = 1 << 60
"""Of a stream; what is larger is damage, and no number of tokens."""


@dataclasses.dataclass(frozen=True)
class Split:
    """Size of one stream."""

    num_tokens: int
    num_documents: int


@dataclasses.dataclass(frozen=True)
class Meta:
    """What `meta.json` says."""

    tokenizer: str
    """`bytes`, or `tokenizer.json` beside it."""
    vocab_size: int
    end_id: int
    dtype: str
    """`uint16` or `uint32`."""
    splits: dict[str, Split]


class MappedTokens:
    """A file of token ids that reaches other processes as its name.

    Args:
        path: The file, not empty.
        dtype: `uint16` or `uint32`.
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
    """One stream of tokens and its documents, opened."""

    name: str
    """The file, or the source, for messages."""
    tokens: np.ndarray | MappedTokens
    offsets: Int64[np.ndarray, " offsets"]
    """Where each document starts, and the end of the last."""
    vocab_size: int


class SplitWriter:
    """Appends documents to one stream.

    Args:
        directory: Where `<split>.bin` and `<split>.idx` are made.
        split: `train` or `validation`.
        dtype: `uint16` or `uint32`.
    """

    def __init__(self, directory: pathlib.Path, split: str, dtype: str):
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._tokens = open(directory / f"{split}.bin", "wb")
        self._offsets = open(directory / f"{split}.idx", "wb")
        self._offsets.write(np.zeros(1, "<i8").tobytes())
        self.num_tokens = 0
        self.num_documents = 0

    def append(self, ids: np.ndarray, end_id: int) -> None:
        """Writes the ids of one document and the token that ends it."""
        self._tokens.write(np.append(ids, end_id).astype(self._dtype).tobytes())
        self.num_tokens += len(ids) + 1
        self.num_documents += 1
        self._offsets.write(np.array(self.num_tokens, "<i8").tobytes())

    def close(self) -> None:
        """Brings everything to disk."""
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
        DataError: There is none, or it is not one of ours.
    """
    remedy = "give a directory made by `zjax data prepare`"
    try:
        content = parse_json(read_text(pathlib.Path(path) / META_NAME))
    except (FileNotFoundError, NotADirectoryError) as error:
        problem = Problem("data.path", path, f"holds no {META_NAME}", remedy)
        raise DataError(problem) from error
    except OSError as error:
        said = f"has a {META_NAME} that cannot be read ({error.strerror or error})"
        remedy = find_remedy(error, default=remedy)
        raise DataError(Problem("data.path", path, said, remedy)) from error
    except ValueError as error:
        problem = Problem("data.path", path, f"has a broken {META_NAME}", remedy)
        raise DataError(problem) from error
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        said = f"has a {META_NAME} that is not of format {FORMAT}"
        raise DataError(Problem("data.path", path, said, remedy))
    if not _is_sound(content):
        raise DataError(Problem("data.path", path, f"has a broken {META_NAME}", remedy))
    splits = {name: Split(**sizes) for name, sizes in content.pop("splits").items()}
    return Meta(splits=splits, **content)


def _is_sound(content: dict[str, Any]) -> bool:
    if content.keys() != {field.name for field in dataclasses.fields(Meta)}:
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
        and all(type(n) is int and 0 < n < MOST_BYTES for n in counts)
        and type(content["vocab_size"]) is int
        and 0 < content["vocab_size"] <= text.MOST_VOCAB
        and type(content["end_id"]) is int
        and 0 <= content["end_id"] < content["vocab_size"]
    )


def open_store(path: str, split: str) -> Store:
    """Maps one stream of a directory made by `zjax data prepare`.

    Args:
        path: The directory.
        split: `train` or `validation`.

    Raises:
        DataError: The directory is not one, lacks the split, was cut off, or holds ids
            beyond its own vocabulary.
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
    try:
        tokens = MappedTokens(file, meta.dtype)
        largest = largest_id(tokens)
        offsets = np.fromfile(index, "<i8").astype(np.int64)
    except OSError as error:
        said = f"cannot be read ({error.strerror or error})"
        problem = Problem("data.path", str(file), said, "check the file and its disk")
        raise DataError(problem) from error
    if largest >= meta.vocab_size:
        said = f"holds token id {largest}, beyond its vocabulary of {meta.vocab_size}"
        raise DataError(Problem("data.path", str(file), said, "prepare it again"))
    ends = int(offsets[0]), int(offsets[-1])
    if ends != (0, sizes.num_tokens) or np.any(offsets[1:] <= offsets[:-1]):
        said = f"does not cut {sizes.num_tokens} tokens into documents"
        raise DataError(Problem("data.path", str(index), said, "prepare it again"))
    return Store(str(file), tokens, offsets, meta.vocab_size)


def open_tokenizer(path: str) -> text.Tokenizer:
    """Opens the vocabulary of a directory made by `zjax data prepare`."""
    meta = read_meta(path)
    if meta.tokenizer == "bytes":
        return text.make_bytes()
    return text.load_tokenizer(pathlib.Path(path) / TOKENIZER_NAME)


def digest_tokenizer(path: str) -> str:
    """Sums up the vocabulary of a directory made by `zjax data prepare`."""
    meta = read_meta(path)
    is_file = meta.tokenizer != "bytes"
    content = text.read_file(pathlib.Path(path) / TOKENIZER_NAME) if is_file else b""
    found = hashlib.sha256(f"{meta.vocab_size} {meta.end_id} ".encode() + content)
    return found.hexdigest()[:16]


def largest_id(tokens: np.ndarray | MappedTokens) -> int:
    """Finds the largest id: of all tokens, or of 64 equally spaced parts if many."""
    return max(int(part.max()) for part in digest.token_parts(tokens))


def _check_size(file: pathlib.Path, expected_bytes: int) -> None:
    found = f"holds {file.stat().st_size} bytes" if file.is_file() else "is missing"
    if found == f"holds {expected_bytes} bytes":
        return
    said = f"{found}, but {META_NAME} says {expected_bytes}"
    raise DataError(Problem("data.path", str(file), said, "prepare it again"))
