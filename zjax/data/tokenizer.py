"""Tokenizers: bytes, numbers, and those of the `tokenizers` library, in one form."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from zjax.config.paths import local_path
from zjax.errors import DataError, Problem, ZjaxError
from zjax.packages import check_installed
from zjax.reading import read_text

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|eos|>", "<eos>", "</s>")
"""Names of the end-of-document token in published vocabularies; first match wins."""
NUM_BYTES = 256
MAX_VOCAB = 1 << 24
"""Largest vocabulary, also of a model."""
MAX_FILE_BYTES = 1 << 29
"""Largest `tokenizer.json`."""


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A vocabulary, with encoding and decoding."""

    name: str
    """`bytes`, `numbers`, or the path of the file."""
    vocab_size: int
    """Largest id plus 1."""
    end_id: int
    """Token that ends every document."""
    encode_batch: Callable[[Sequence[str]], list[np.ndarray]]
    """Function from texts to int32 ids of each, without the end token."""
    decode: Callable[[Any], str]
    """Function from ids, any 1-d integer array, to text; skips the end token."""

    def encode(self, text: str) -> Int32[np.ndarray, " T"]:
        """Encodes one text, without the end token."""
        return self.encode_batch([text])[0]


def make_bytes() -> Tokenizer:
    """Makes the tokenizer of the 256 bytes of UTF-8 and an end token.

    Example:
        >>> tokenizer = make_bytes()
        >>> tokenizer.encode("hé").tolist(), tokenizer.decode([104, 195, 169, 256])
        ([104, 195, 169], 'hé')
    """

    def encode_batch(texts: Sequence[str]) -> list[np.ndarray]:
        encoded = (text.encode() for text in texts)
        return [np.frombuffer(text, np.uint8).astype(np.int32) for text in encoded]

    def decode(ids: Any) -> str:
        ids = np.asarray(ids)
        return bytes(ids[ids < NUM_BYTES].tolist()).decode(errors="replace")

    return Tokenizer("bytes", NUM_BYTES + 1, NUM_BYTES, encode_batch, decode)


def make_numbers(vocab_size: int) -> Tokenizer:
    """Makes the tokenizer whose tokens are decimal numbers, for synthetic data.

    Example:
        >>> make_numbers(100).decode([3, 14, 15])
        '3 14 15'
    """

    def encode_batch(texts: Sequence[str]) -> list[np.ndarray]:
        try:
            return [np.array(text.split(), np.int32) for text in texts]
        except ValueError as error:
            problem = "is not made of numbers, as the tokens of this run are"
            remedy = "use some, such as '5 6 7'"
            raise DataError(Problem("prompt", texts[0], problem, remedy)) from error

    def decode(ids: Any) -> str:
        return " ".join(map(str, np.asarray(ids).tolist()))

    return Tokenizer("numbers", vocab_size, vocab_size - 1, encode_batch, decode)


def load_tokenizer(path: str | pathlib.Path) -> Tokenizer:
    """Reads a `tokenizer.json` of the `tokenizers` library.

    Control tokens are never produced by text, even if it spells one.

    Raises:
        DataError: The file is missing or unreadable, or has no end-of-document token.
    """
    path = local_path("tokenizer", path, DataError)
    check_installed("tokenizers")
    import tokenizers

    content = read_file(pathlib.Path(path))
    problem, remedy = "is not a file of the tokenizers library", "give a tokenizer.json"
    with data_errors(path, problem, remedy):
        library = tokenizers.Tokenizer.from_buffer(content)
    return _wrap_library(library, path)


def read_file(path: pathlib.Path) -> bytes:
    """Reads a `tokenizer.json`.

    Raises:
        DataError: The file is missing, unreadable or too large.
    """
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
        is_panic = type(error).__name__ == "PanicException"
        if not is_panic and not isinstance(error, Exception):
            raise
        problem = Problem("tokenizer", name, f"{text} ({error})", remedy)
        raise DataError(problem) from error


def train_bpe(texts: Iterable[str], vocab_size: int) -> Any:
    """Learns byte-pair merges, with a vocabulary of `vocab_size`, 258 or more.

    A small text may give fewer. Returns a tokenizer of the `tokenizers` library.

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
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    return library


def _wrap_library(library: Any, name: str) -> Tokenizer:
    vocabulary = library.get_vocab()
    ends = [token for token in END_TOKENS if token in vocabulary]
    if not ends:
        raise DataError(
            Problem(
                "tokenizer",
                name,
                "has no token that ends a document",
                f"add one of {', '.join(END_TOKENS)}",
            )
        )
    library.encode_special_tokens = True
    library.no_truncation()
    library.no_padding()

    def encode_batch(texts: Sequence[str]) -> list[np.ndarray]:
        with data_errors(name, "cannot encode a text", "give one that can"):
            encodings = library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(ids: Any) -> str:
        with data_errors(name, "cannot decode tokens", "give one that can"):
            return library.decode(np.asarray(ids).tolist())

    end_id = vocabulary[ends[0]]
    vocab_size = max(vocabulary.values()) + 1
    if vocab_size > MAX_VOCAB:
        problem, remedy = (
            f"has token id {vocab_size - 1}",
            f"use ids below {MAX_VOCAB}",
        )
        raise DataError(Problem("tokenizer", name, problem, remedy))
    return Tokenizer(name, vocab_size, end_id, encode_batch, decode)
