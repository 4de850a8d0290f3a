"""Tokenizers of bytes, of numbers, and of the `tokenizers` library, in one form."""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from zjax.data.tokenizer_files import (
    END_TOKENS,
    MAX_FILE_BYTES,
    TokenizerRecord,
    digest_vocabulary,
    make_record,
    write_files,
)
from zjax.errors import DataError, Problem, ZjaxError, check_installed
from zjax.files import local_path, read_text

NUM_BYTES = 256
NUMBERS = "numbers"
"""Name of the tokenizer of ids without a known meaning."""


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A vocabulary, with encoding and decoding."""

    record: TokenizerRecord
    """Digest, sizes, and the ids that begin and end texts."""
    encode_texts: Callable[[Sequence[str], bool], list[np.ndarray]]
    """Function from texts to int32 ids of each, without BOS and end token; names of
    special tokens are encoded as special tokens if the second argument is true, else as
    text."""
    decode: Callable[[Any], str]
    """Function from ids, any 1-d integer array, to text; skips special tokens."""
    special_tokens: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Ids of special tokens by the names that a text can spell."""

    @property
    def name(self) -> str:
        """Name `bytes`, `numbers`, `bpe:<vocab_size>`, or the path that a user gave."""
        return self.record.name

    @property
    def vocab_size(self) -> int:
        """Largest id plus 1."""
        return self.record.vocab_size

    @property
    def bos_id(self) -> int | None:
        """Id with which each text begins, or None."""
        return self.record.bos_id

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a text, the end token of documents first; often one id."""
        return self.record.end_ids

    @property
    def end_id(self) -> int:
        """Id of the token that ends each document."""
        if not self.end_ids:
            problem = "has no token that ends a document"
            remedy = "name one as eos_token in the tokenizer_config.json beside it "
            remedy += "(read if the file is called tokenizer.json), or "
            remedy += f"add one of {', '.join(END_TOKENS)}"
            raise DataError(Problem("tokenizer", self.name, problem, remedy))
        return self.end_ids[0]

    def encode(
        self, text: str, *, special_tokens: bool = False
    ) -> Int32[np.ndarray, " T"]:
        """Encodes the beginning of a text, with BOS if texts begin with BOS.

        Names of special tokens are text unless `special_tokens`.
        """
        return self.encode_batch([text], special_tokens=special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], *, special_tokens: bool = False
    ) -> list[np.ndarray]:
        """Encodes the beginnings of several texts, as `encode` does."""
        return [self.begin(ids) for ids in self.encode_texts(texts, special_tokens)]

    def begin(self, ids: Int32[np.ndarray, " T"]) -> Int32[np.ndarray, " begun"]:
        """Puts BOS before the ids of a text that lacks it, if texts begin with BOS."""
        if self.bos_id is None or self.bos_id in ids[:1]:
            return ids
        return np.insert(ids, 0, self.bos_id)

    def end(self, ids: Int32[np.ndarray, " T"]) -> Int32[np.ndarray, " ended"]:
        """Puts the end token behind the ids of a text that lack it."""
        return ids if self.end_id in ids[-1:] else np.append(ids, np.int32(self.end_id))

    @functools.cached_property
    def _starts(self) -> set[str]:
        """First two characters of all special tokens, which most texts lack."""
        return {name[:2] for name in self.special_tokens}

    def find_special_tokens(self, text: str) -> list[str]:
        """Names of special tokens that a text spells, in vocabulary order."""
        # There may be hundreds of special tokens, with few distinct starts.
        if not any(start in text for start in self._starts):
            return []
        return [name for name in self.special_tokens if name in text]


def make_bytes() -> Tokenizer:
    """Makes the tokenizer of the 256 bytes of UTF-8 and an end token."""

    def encode_texts(texts: Sequence[str], special_tokens: bool) -> list[np.ndarray]:
        encoded = (text.encode() for text in texts)
        return [np.frombuffer(text, np.uint8).astype(np.int32) for text in encoded]

    def decode(ids: Any) -> str:
        ids = np.asarray(ids)
        # The end token is no byte, and generation may stop inside a character.
        return bytes(ids[ids < NUM_BYTES].tolist()).decode(errors="replace")

    digest = digest_vocabulary(byte_vocabulary())
    record = TokenizerRecord("bytes", digest, NUM_BYTES + 1, None, (NUM_BYTES,))
    return Tokenizer(record, encode_texts, decode)


def write_bytes_tokenizer(folder: pathlib.Path) -> None:
    """Writes the tokenizer `bytes` as files of the `tokenizers` library."""
    check_installed("tokenizers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = byte_vocabulary()
    del vocabulary[END_TOKENS[0]]  # added below, as a special token
    library = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([END_TOKENS[0]])
    special = {"eos_token": END_TOKENS[0]}
    write_files(folder, library.to_str(pretty=True), special)


def byte_vocabulary() -> dict[str, int]:
    """Ids of `bytes` by the characters that stand for bytes in a BPE.

    Reference:
        `bytes_to_unicode` of GPT-2: printable bytes are their characters, the others
        follow from U+0100 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(NUM_BYTES) if byte not in printable]
    characters = {byte: chr(NUM_BYTES + n) for n, byte in enumerate(hidden)}
    characters |= {byte: chr(byte) for byte in printable}
    return {text: byte for byte, text in characters.items()} | {
        END_TOKENS[0]: NUM_BYTES
    }


def make_numbers(vocab_size: int) -> Tokenizer:
    """Makes the tokenizer of decimal numbers, for synthetic data."""

    def encode_texts(texts: Sequence[str], special_tokens: bool) -> list[np.ndarray]:
        try:
            return [np.array(text.split(), np.int32) for text in texts]
        except ValueError as error:
            problem = "is not made of numbers, as the tokens of this run are"
            remedy = "use some, such as '5 6 7'"
            raise DataError(Problem("prompt", texts[0], problem, remedy)) from error

    def decode(ids: Any) -> str:
        return " ".join(map(str, np.asarray(ids).tolist()))

    record = TokenizerRecord(NUMBERS, "", vocab_size, None, (vocab_size - 1,))
    return Tokenizer(record, encode_texts, decode)


def load_tokenizer(
    path: str | pathlib.Path, record: TokenizerRecord | None = None
) -> Tokenizer:
    """Reads a `tokenizer.json` of the `tokenizers` library, and the files beside it.

    With a `record`, the vocabulary must match; without, a record is made of the files.
    """
    path = local_path("tokenizer", path, DataError)
    library = load_library(path)
    if record is None:
        return _wrap_library(library, make_library_record(library, path))
    if digest_vocabulary(library.get_vocab()) != record.digest:
        problem = f"has other tokens than {record.name!r}, which made the token ids"
        remedy = "put the tokenizer.json back that was there, or prepare the text again"
        raise DataError(Problem("tokenizer", str(path), problem, remedy))
    return _wrap_library(library, record)


def make_library_record(library: Any, path: str | pathlib.Path) -> TokenizerRecord:
    """Makes the record of a `tokenizer.json` and the files beside it."""
    vocabulary, prefix = library.get_vocab(), _prefix_of(library)
    return make_record(pathlib.Path(path), str(path), vocabulary, prefix)


def special_tokens_of(library: Any) -> dict[str, int]:
    """Ids of the special tokens of a library tokenizer, by name."""
    added = library.get_added_tokens_decoder().items()
    return {token.content: number for number, token in added if token.special}


def load_library(path: str | pathlib.Path) -> Any:
    """Reads a `tokenizer.json` as an object of the `tokenizers` library."""
    check_installed("tokenizers")
    import tokenizers

    content = read_file(pathlib.Path(path))
    problem, remedy = "is not a file of the tokenizers library", "give a tokenizer.json"
    with data_errors(str(path), problem, remedy):
        library = tokenizers.Tokenizer.from_buffer(content)
    # A file may ask for both, which would change the ids of long and short texts.
    library.no_truncation()
    library.no_padding()
    return library


def _prefix_of(library: Any) -> list[int]:
    """Finds the ids that the post-processor writes before a text."""
    try:
        alone = library.encode("a", add_special_tokens=False).ids
        whole = library.encode("a").ids
    except Exception:  # a vocabulary without this letter and without unknown tokens
        return []
    # The ids before the first occurrence of the bare text are the prefix.
    starts = range(len(whole) - len(alone) + 1)
    found = (n for n in starts if whole[n : n + len(alone)] == alone)
    return whole[: next(found, 0)]


def read_file(path: pathlib.Path) -> bytes:
    """Reads a `tokenizer.json` within a size limit."""
    if not path.is_file():
        raise DataError(
            Problem("tokenizer", str(path), "is not a file", "give a tokenizer.json")
        )
    try:
        return read_text(path, MAX_FILE_BYTES).encode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        problem, remedy = f"cannot be read ({reason})", "give a tokenizer.json"
        raise DataError(Problem("tokenizer", str(path), problem, remedy)) from error


@contextlib.contextmanager
def data_errors(name: str, text: str, remedy: str) -> Iterator[None]:
    """Raises errors of the library, which may be panics, as DataErrors."""
    try:
        yield
    except ZjaxError:
        raise
    except BaseException as error:
        # By name: a panic of Rust is a BaseException of a class that is not importable.
        is_panic = type(error).__name__ == "PanicException"
        if not is_panic and not isinstance(error, Exception):
            raise
        problem = Problem("tokenizer", name, f"{text} ({error})", remedy)
        raise DataError(problem) from error


def train_bpe(texts: Iterable[str], vocab_size: int) -> Any:
    """Learns byte-pair merges, with a vocabulary of `vocab_size`, 258 or more.

    A small text may give fewer merges. Returns a tokenizer of the `tokenizers` library.

    Reference:
        Sennrich, Haddow and Birch (arXiv:1508.07909), over bytes as in GPT-2.
    """
    check_installed("tokenizers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKENS[0]],
        # All bytes, so that any text can be encoded.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    return library


def _wrap_library(library: Any, record: TokenizerRecord) -> Tokenizer:
    """Wraps an object of the `tokenizers` library."""
    name = record.name

    def encode_texts(texts: Sequence[str], special_tokens: bool) -> list[np.ndarray]:
        # The library's flag means: encode the names as text.
        library.encode_special_tokens = not special_tokens
        with data_errors(name, "cannot encode a text", "give one that can"):
            # Fast: without offsets. BOS and end tokens come from `begin` and `end`.
            encodings = library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(ids: Any) -> str:
        with data_errors(name, "cannot decode tokens", "give one that can"):
            return library.decode(
                ids if type(ids) is list else np.asarray(ids).tolist()
            )

    return Tokenizer(record, encode_texts, decode, special_tokens_of(library))
