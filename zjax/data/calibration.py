"""Rows that measure a model before or after training, in batches of equal shapes."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from zjax.data.draws import permute_rows
from zjax.data.packing import Rows
from zjax.errors import Problem

_PASS_TOKENS = 16_384
"""Most tokens of a batch, which bounds the activations in memory."""


def row_problems(
    rows: Rows, numbers: Mapping[str, int], split: str
) -> Iterator[Problem]:
    """Yields numbers of rows, by setting, that a split of the data does not have."""
    for setting, number in numbers.items():
        if len(rows) < number:
            problem = f"is more than the {len(rows)} rows of the {split} data"
            yield Problem(setting, number, problem, f"use {len(rows)} or fewer")


def read_batches(
    rows: Rows, number: int, *, length: int, seed: int
) -> list[dict[str, np.ndarray]]:
    """Reads rows of some length in an order that depends on the seed, in equal batches.

    Fewer rows than `number` are all read.
    """
    places = np.arange(min(number, len(rows)), dtype=np.int64)
    indices = permute_rows(places, len(rows), seed, epoch=0)
    most = max(1, _PASS_TOKENS // length)
    size = max(n for n in range(1, most + 1) if len(indices) % n == 0)
    return [
        {name: np.asarray(x) for name, x in rows.read(indices[i : i + size]).items()}
        for i in range(0, len(indices), size)
    ]


def digest_batches(batches: Sequence[Mapping[str, np.ndarray]]) -> str:
    """Returns the SHA-256 of the arrays of batches."""
    found = hashlib.sha256()
    for batch in batches:
        for name, x in sorted(batch.items()):
            found.update(name.encode() + np.ascontiguousarray(x).tobytes())
    return found.hexdigest()
