"""Opens the rows and the tokenizer that settings name; data without files."""

import hashlib
import json
import os
import pathlib
import sysconfig
from collections.abc import Iterable
from typing import Any

import numpy as np
from absl import logging
from jaxtyping import Int64

from zjax.data import packing, store
from zjax.data import tokenizer as text
from zjax.data.example_rows import ExampleRows
from zjax.data.tokenizer_files import TokenizerRecord
from zjax.errors import DataError, Problem
from zjax.schedule.lengths import CUTS
from zjax.schedule.pacing import settings_read
from zjax.settings import schema
from zjax.settings.preference import Preference

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
    tokenizer = text.make_bytes()
    documents = [_with_end(x, tokenizer.end_id) for x in _choose_files(root, split)]
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
    tokens = np.concatenate(documents)
    return store.Store("standard_library", tokens, offsets, tokenizer.vocab_size)


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


def _with_end(path: pathlib.Path, end_id: int) -> np.ndarray:
    content = np.frombuffer(path.read_bytes(), np.uint8)
    return np.append(content.astype(np.uint16), np.uint16(end_id))


NUM_ROWS = 1 << 40
"""Rows per epoch; no run finishes an epoch."""
JUMP_PROBABILITY = 1 / 8
DOCUMENTS_PER_ROW = 4


class SyntheticRows:
    """Rows with the fields of `packing.BlockRows` or `packing.DocumentRows`.

    Args:
        seed: Seed of the sample, 0 or more; the stride depends on the vocabulary alone.
        split: Name of the split, `train` or `validation`, with different rows.
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


def make_tokenizer(config: schema.Config) -> text.Tokenizer:
    """Makes the tokenizer of the data of a run.

    Raises:
        DataError: `data.path` is not a directory made by `zjax data prepare`.

    Example:
        >>> make_tokenizer(schema.Config()).vocab_size
        257
    """
    return open_tokenizer(config.data, config.model.vocab_size)


def open_tokenizer(data: schema.Data, vocab_size: int) -> text.Tokenizer:
    """Opens the tokenizer of some data; synthetic data has `vocab_size` tokens."""
    match data.source:
        case "standard_library":
            return text.make_bytes()
        case "tokens":
            return store.open_tokenizer(data.path)
        case "synthetic":
            return text.make_numbers(vocab_size)


def read_record(data: schema.Data, vocab_size: int) -> TokenizerRecord:
    """Reads the record of the tokenizer of some data."""
    if data.source == "tokens":
        return store.read_meta(data.path).tokenizer
    return open_tokenizer(data, vocab_size).record


def open_rows(config: schema.Config, split: str) -> packing.Rows:
    """Opens the rows of a split, `train` or `validation`."""
    data = config.data
    if data.source == "synthetic":
        documents = data.packing == "documents"
        return SyntheticRows(
            config.seed if split == "train" else 0,  # one evaluation set for all runs
            split,
            config.model.vocab_size,
            data.length,
            DOCUMENTS_PER_ROW if documents else 0,
        )
    documents = open_documents(data, split, config.model.vocab_size)
    check_objective(documents, data.path, config.preference)
    return _make_rows(documents, data, split)


def open_documents(data: schema.Data, split: str, vocab_size: int) -> store.Store:
    """Opens the documents of a split, `train` or `validation`; not synthetic data."""
    if data.source == "standard_library":
        opened = open_standard_library(split)
    else:
        opened = store.open_store(data.path, split)
    check_vocabulary(opened, data.source, vocab_size)
    return opened


def row_settings(data: schema.Data) -> dict[str, Any]:
    """Settings by path that determine, with the data, the content of each row."""
    names = ("source", "length", "packing")
    settings = {f"data.{name}": getattr(data, name) for name in names}
    if data.source == "tokens":
        settings["data.tokenizer"] = store.digest_tokenizer(data.path)
    return settings


def order_settings(
    warmup: schema.SequenceWarmup | None, shapes: Iterable[tuple[int, int]] = ()
) -> dict[str, Any]:
    """Settings by path that determine which tokens of the rows each step reads.

    Switched-off features are named, too, so that resuming with another switch is
    noticed. `shapes` are rows and tokens per row of the batches of a run.
    """
    off = {"buckets": None, "curriculum.metrics": [], "sequence_warmup": None}
    if not isinstance(warmup, CUTS):
        return off
    read = settings_read("sequence_warmup.pacing", warmup.pacing)
    if isinstance(warmup, schema.Reshape):
        read["sequence_warmup rows"] = [rows for rows, _ in shapes]
    return off | {"sequence_warmup": warmup.kind} | read


def digest_samples(data: schema.Data, rows: packing.Rows) -> str:
    """Hashes the data and the settings of rows; 16 hexadecimal digits.

    An index of samples carries the digest, so that other rows refuse the index.
    """
    content = [len(rows), rows.digest(), row_settings(data)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def check_vocabulary(opened: store.Store, source: str, vocab_size: int) -> None:
    """Refuses data with a vocabulary larger than `vocab_size`."""
    if opened.vocab_size <= vocab_size:
        return
    # For the message: a padded vocabulary may be larger than all ids of the data.
    largest = store.largest_id(opened.tokens)
    field, value = "data.path", opened.name
    if source == "standard_library":
        field, value = "data.source", source
    raise DataError(
        Problem(
            field,
            value,
            f"has a vocabulary of {opened.vocab_size} (largest id found: {largest}), "
            f"beyond model.vocab_size={vocab_size}",
            f"set model.vocab_size={opened.vocab_size} or more",
        )
    )


def check_no_answers(
    opened: store.Store, setting: str, value: str, remedy: str | None
) -> None:
    """Refuses conversations for rows that do not know which tokens are answers."""
    if opened.answers is not None:
        problem = f"takes all tokens of {opened.name} for answers"
        raise DataError(Problem(setting, value, problem, f"use {remedy!r}"))


def check_objective(
    opened: store.Store, path: str, preference: Preference | None
) -> None:
    """Refuses examples without an objective that reads them, and the opposite."""
    kind = "none" if preference is None else preference.kind
    kinds = () if preference is None else preference.examples
    if opened.kind in kinds or not (opened.kind or kinds):
        return
    problem, remedy = f"holds {opened.kind or 'no examples'}", "prepare it again"
    if kinds:
        remedy = f"prepare it with --examples={' or '.join(kinds)}"
    else:
        remedy = "choose a preference, which compares completions"
    problem += f", which preference={kind!r} does not read"
    raise DataError(Problem("data.path", path, problem, remedy))


def _make_rows(opened: store.Store, data: schema.Data, split: str) -> packing.Rows:
    """Makes the rows of `data.packing`."""
    if opened.kind and data.packing == "documents":
        examples = ExampleRows(opened, data.length)
        _tell_left_out(examples, data.length)
        return examples
    if data.packing == "documents":
        documents = packing.DocumentRows(
            opened.tokens, opened.offsets, data.length, opened.answers
        )
        _tell_cut(documents, opened, data.length)
        return documents
    check_no_answers(opened, "data.packing", "blocks", "documents")
    rows = packing.BlockRows(opened.tokens, data.length)
    if len(rows) == 0:
        raise DataError(
            Problem(
                "data.length",
                data.length,
                f"needs {data.length + 1} tokens, but the {split} split of "
                f"{opened.name} has {len(opened.tokens)}",
                f"use {len(opened.tokens) - 1} or less, or more text",
            )
        )
    return rows


def _tell_cut(rows: packing.DocumentRows, opened: store.Store, length: int) -> None:
    """Warns of conversations longer than a row; refuses data without a loss."""
    longest = int(np.diff(opened.offsets).max(initial=0))
    if len(rows) == 0:
        problem = (
            f"is over before the first answer of each conversation of {opened.name}"
        )
        remedy = f"use up to {longest}, the longest of them"
        raise DataError(Problem("data.length", length, problem, remedy))
    if rows.num_cut:
        logging.warning(
            "data.length=%s cuts %s of %s conversations of %s, the longest of %s "
            "tokens; %s have no answer before the cut and are left out",
            f"{length:,}",
            f"{rows.num_cut:,}",
            f"{len(opened.offsets) - 1:,}",
            opened.name,
            f"{longest:,}",
            f"{rows.num_left_out:,}",
        )


def _tell_left_out(rows: ExampleRows, length: int) -> None:
    """Warns of examples longer than a row; refuses rows without examples."""
    opened, ends = rows.opened, rows.opened.examples
    assert ends is not None
    longest = int(np.diff(opened.offsets[ends]).max(initial=0))
    if not len(rows):
        problem = f"has no room for the completions of an example of {opened.name}"
        remedy = f"use up to {longest}, which the longest needs"
        raise DataError(Problem("data.length", length, problem, remedy))
    if rows.num_left_out:
        logging.warning(
            "data.length=%s leaves out %s of %s examples of %s, whose completions do "
            "not fit one row; the longest needs %s",
            f"{length:,}",
            f"{rows.num_left_out:,}",
            f"{len(ends) - 1:,}",
            opened.name,
            f"{longest:,}",
        )
