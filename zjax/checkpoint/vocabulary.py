"""More tokens than a checkpoint has: new rows of its tables are the mean of the others.

So does `resize_token_embeddings` of transformers, which adds noise whose variance is a
billionth of that of the rows.
"""

import functools
from collections.abc import Mapping

import jax
import numpy as np
from absl import logging

from zjax.checkpoint.export import tensor_name
from zjax.checkpoint.layout import Entry
from zjax.checkpoint.views import Index, Source
from zjax.config import schema
from zjax.config.groups import is_held_frozen
from zjax.errors import ConfigError, Problem

TABLES = ("embedding/tokens", "head/kernel", "head/bias")
"""Arrays of the built-in models with a row for each token."""
_SLAB_ROWS = 4_096


def resized(
    source: Source, wanted: Mapping[str, Entry], config: schema.Config
) -> Source:
    """The arrays with the rows of `model.vocab_size`, if that was asked for.

    Args:
        source: Arrays of any checkpoint, with dots in their names.
        wanted: Arrays of the model to start.
        config: Read for `checkpoint`, `model` and `lora`.

    Returns:
        The arrays. Process 0 logs which of them have new rows.

    Raises:
        ConfigError: The checkpoint has as many tokens already, or more, or no table
            that the model has.
    """
    path = config.checkpoint.init_from
    names = {tensor_name(x): x for x in TABLES if tensor_name(x) in source.entries}
    names = {name: x for name, x in names.items() if name in wanted}
    if not config.checkpoint.resize_vocabulary:
        return source
    if not names:
        raise _useless(
            f"finds no table of tokens in checkpoint.init_from={path!r} "
            "that the model has"
        )
    size, (old, *_) = config.model.vocab_size, map(source.entries.get, names)
    assert old is not None
    if old.shape[0] >= size:
        raise _useless(
            f"has no new rows: checkpoint.init_from={path!r} has "
            f"{old.shape[0]} tokens, model.vocab_size is {size}"
        )
    _report(path, old.shape[0], [*names.values()], config)

    @functools.cache
    def mean(name: str) -> np.ndarray:
        rows, *others = source.entries[name].shape
        spans = [slice(0, n) for n in others]
        total = np.zeros(others)
        for first in range(0, rows, _SLAB_ROWS):
            slab = slice(first, min(first + _SLAB_ROWS, rows))
            total += source.read(name, (slab, *spans)).sum(0, np.float64)
        return total / rows

    def read(name: str, index: Index) -> np.ndarray:
        if name not in names:
            return source.read(name, index)
        rows, *others = index
        count = source.entries[name].shape[0]
        known = slice(min(rows.start, count), min(rows.stop, count))
        found = source.read(name, (known, *others))
        num_new = rows.stop - rows.start - len(found)
        new = mean(name)[tuple(others)].astype(found.dtype)
        return np.concatenate([found, np.broadcast_to(new, (num_new, *new.shape))])

    grown = {n: source.entries[n] for n in names}
    entries = {n: Entry((size, *x.shape[1:]), x.dtype) for n, x in grown.items()}
    return Source({**source.entries, **entries}, read)


def _useless(problem: str) -> ConfigError:
    remedy = "set it to False"
    return ConfigError(Problem("checkpoint.resize_vocabulary", True, problem, remedy))


def _report(path: str, num_old: int, tables: list[str], config: schema.Config) -> None:
    if jax.process_index() != 0:
        return
    size = config.model.vocab_size
    frozen = [name for name in tables if is_held_frozen(name, config)]
    note = f"; frozen are {', '.join(frozen)}: lora.also_train trains them"
    logging.warning(
        "checkpoint.init_from=%r has %d tokens, and model.vocab_size=%d: new rows of "
        "%s are the mean of the others%s",
        *(path, num_old, size, ", ".join(tables), note if frozen else ""),
    )
