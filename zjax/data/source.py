"""Opens the rows and the tokenizer that the settings of a run name."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
from absl import logging

from zjax.data import packing, store, synthetic
from zjax.data import tokenizer as text
from zjax.data.tokenizer_files import TokenizerRecord
from zjax.errors import DataError, Problem
from zjax.schedule.lengths import CUTS
from zjax.schedule.pacing import settings_read
from zjax.settings import schema


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
    """Reads the record of the tokenizer of some data.

    Example:
        >>> read_record(schema.Data(), 257).end_ids
        (256,)
    """
    if data.source == "tokens":
        return store.read_meta(data.path).tokenizer
    return open_tokenizer(data, vocab_size).record


def open_rows(config: schema.Config, split: str) -> packing.Rows:
    """Opens the rows of a split, `train` or `validation`."""
    data = config.data
    if data.source == "synthetic":
        documents = data.packing == "documents"
        return synthetic.SyntheticRows(
            config.seed if split == "train" else 0,  # one evaluation set for all runs
            split,
            config.model.vocab_size,
            data.length,
            synthetic.DOCUMENTS_PER_ROW if documents else 0,
        )
    documents = open_documents(data, split, config.model.vocab_size)
    return _make_rows(documents, data, split)


def open_documents(data: schema.Data, split: str, vocab_size: int) -> store.Store:
    """Opens the documents of a split, `train` or `validation`; not synthetic data."""
    if data.source == "standard_library":
        opened = synthetic.open_standard_library(split)
    else:
        opened = store.open_store(data.path, split)
    check_vocabulary(opened, data.source, vocab_size)
    return opened


def row_settings(data: schema.Data) -> dict[str, Any]:
    """Settings by path that determine, together with the data, the content of each row.

    Example:
        >>> row_settings(schema.Data())["data.packing"]
        'blocks'
    """
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

    Example:
        >>> order_settings(None)
        {'buckets': None, 'curriculum.metrics': [], 'sequence_warmup': None}
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


def _make_rows(opened: store.Store, data: schema.Data, split: str) -> packing.Rows:
    """Makes the rows of `data.packing`."""
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
