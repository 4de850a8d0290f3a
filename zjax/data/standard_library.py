"""Text that every machine has: the source of Python's standard library.

Files are split into train and validation by a hash of their name, the same on all
machines, and taken in the order of that hash, so that the size limit cuts at random.
"""

import hashlib
import os
import pathlib
import sysconfig

import numpy as np

from zjax.data import store
from zjax.data import tokenizer as text
from zjax.errors import DataError, Problem

LIMIT_BYTES = 32 << 20
"""Most text to read; CPython 3.11 has 12 MB."""
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
"""Third-party packages, and tests, which are larger than everything else."""


def open_standard_library(split: str, root: str = "") -> store.Store:
    """Reads a split of the standard library as bytes, one document per file.

    Raises:
        DataError: It has no source files (a zipped or stripped installation).
    """
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
    files = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in SKIPPED]
        files += [
            pathlib.Path(directory, name)
            for name in names
            if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    return [path for path in files if path.stat().st_size > 0]


def _hash_name(path: pathlib.Path, root: str) -> int:
    name = path.relative_to(root).as_posix().encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")


def _with_end(path: pathlib.Path) -> np.ndarray:
    content = np.frombuffer(path.read_bytes(), np.uint8)
    return np.append(content.astype(np.uint16), np.uint16(text.make_bytes().end_id))
