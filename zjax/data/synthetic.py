"""Data without files: Python's standard library, and synthetic tokens."""

import hashlib
import os
import pathlib
import sysconfig

import numpy as np
from jaxtyping import Int64

from zjax.data import packing, store
from zjax.data import tokenizer as text
from zjax.errors import DataError, Problem

LIMIT_BYTES = 32 << 20
"""Maximum bytes of text to read; CPython 3.11 has 12 MB."""
VALIDATION_FRACTION = 0.05
"""Fraction of the files that is held out."""
SKIPPED = {
    "__pycache__",
    "dist-packages",
    "idle_test",
    "site-packages",
    "test",
    "tests",
}
"""Folders that are skipped: third-party packages, and tests, the larger part of the
library."""


def open_standard_library(split: str, root: str = "") -> store.Store:
    """Reads a split of the standard library as bytes, one document per file."""
    root = root or sysconfig.get_path("stdlib")
    documents = [_with_end(path) for path in _choose_files(root, split)]
    if not documents:
        raise DataError(
            Problem(
                "data.source",
                "standard_library",
                f"has no {split} files: no Python source lies under {root}",
                "use data.source='tokens' and `zjax data prepare`",
            )
        )
    offsets = np.cumsum([0] + [len(document) for document in documents])
    vocab_size = text.make_bytes().vocab_size
    return store.Store(
        "standard_library", np.concatenate(documents), offsets, vocab_size
    )


def _choose_files(root: str, split: str) -> list[pathlib.Path]:
    """Files of one split, in hash order, within the limit of both splits."""
    # By hash of the name: the split does not depend on the order of the file system.
    hashed = sorted((_hash_name(path, root), path) for path in _list_files(root))
    chosen, num_bytes = [], 0
    for hashed_name, path in hashed:
        num_bytes += path.stat().st_size
        if num_bytes > LIMIT_BYTES:
            break
        held_out = hashed_name % 10_000 < VALIDATION_FRACTION * 10_000
        if held_out == (split == "validation"):
            chosen.append(path)
    return chosen


def _list_files(root: str) -> list[pathlib.Path]:
    """Lists the Python sources under a folder, without empty files."""
    files = []
    for directory, subdirectories, names in os.walk(root):
        # In place, so that os.walk does not enter the skipped folders.
        subdirectories[:] = [name for name in subdirectories if name not in SKIPPED]
        files += [
            pathlib.Path(directory, name)
            for name in names
            # _sysconfigdata differs between builds of one Python version.
            if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    return [path for path in files if path.stat().st_size > 0]


def _hash_name(path: pathlib.Path, root: str) -> int:
    name = path.relative_to(root).as_posix().encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")


def _with_end(path: pathlib.Path) -> np.ndarray:
    content = np.frombuffer(path.read_bytes(), np.uint8)
    return np.append(content.astype(np.uint16), np.uint16(text.make_bytes().end_id))


NUM_ROWS = 1 << 40
"""Rows per epoch; no run finishes an epoch."""
JUMP_PROBABILITY = 1 / 8
DOCUMENTS_PER_ROW = 4


class SyntheticRows:
    """Rows with the fields of `packing.BlockRows` or `packing.DocumentRows`.

    Args:
        seed: Seed of the sample, 0 or more; the stride depends on the vocabulary alone.
        split: Name of the split, `train` or `validation`, with different rows.
        vocab_size: Number of token ids.
        length: Tokens per row.
        num_documents: Documents per row; 0 gives blocks, without segments.
    """

    def __init__(
        self, seed: int, split: str, vocab_size: int, length: int, num_documents: int
    ):
        self._entropy = [seed, int(split == "validation")]
        self._vocab_size = vocab_size
        self._length = length
        self._num_documents = min(num_documents, length)  # one token each at least

    def __len__(self) -> int:
        return NUM_ROWS

    def read(self, indices: Int64[np.ndarray, " n"], /) -> dict[str, np.ndarray]:
        """Computes the rows `indices`."""
        if self._num_documents:
            rows = [self._documents(row) for row in indices.tolist()]
            return packing.stack_pieces(rows, self._length)
        windows = np.stack([self._walk(row) for row in indices.tolist()])
        return {
            "tokens": windows[:, :-1],
            "targets": windows[:, 1:],
            "weights": np.ones((len(indices), self._length), np.float32),
        }

    def digest(self) -> str:
        """Text of the arguments, in place of a checksum."""
        numbers = [*self._entropy, self._vocab_size, self._length, self._num_documents]
        return "-".join(map(str, ["synthetic", *numbers]))

    def _walk(self, row: int) -> np.ndarray:
        """Computes `length + 1` tokens: random jumps, and runs of equal stride."""
        generator = np.random.default_rng([*self._entropy, row])
        positions = np.arange(self._length + 1)
        jumps = generator.random(self._length + 1) < JUMP_PROBABILITY
        # Position of the last jump at or before each token.
        last_jump = np.maximum.accumulate(np.where(jumps, positions, 0))
        random_tokens = generator.integers(self._vocab_size, size=self._length + 1)
        stride = self._vocab_size // 3 + 1
        walk = random_tokens[last_jump] + (positions - last_jump) * stride
        return (walk % self._vocab_size).astype(np.int32)

    def _documents(self, row: int) -> list[tuple[np.ndarray, bool]]:
        """Cuts a row at random places into documents."""
        # The 1 separates these numbers from the numbers of `_walk`.
        generator = np.random.default_rng([*self._entropy, row, 1])
        inside = np.arange(1, self._length)
        cuts = generator.choice(inside, self._num_documents - 1, replace=False)
        pieces = np.split(self._walk(row)[: self._length], np.sort(cuts))
        return [(piece, True) for piece in pieces]
