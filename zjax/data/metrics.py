"""Metrics of samples for a curriculum: numbers of 0 or more that grow with difficulty.

A sample is a row of a loader. The names are from DeepSpeed Data Efficiency
(arXiv:2212.03597): `seqreo` is the effective length, `voc` the vocabulary's rarity.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int, Int64

from zjax.errors import DataError, Problem
from zjax.schedule.pacing import Fault, find_function, is_function_name

METRICS = ("seqreo", "voc", "seqreo_voc", "compression")
MAX_EXACT = 1 << 53
"""Largest integer up to which float64 represents all integers."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Samples that are measured together."""

    numbers: Int64[np.ndarray, " n"]
    """Number of each sample in its dataset."""
    tokens: Int[np.ndarray, "n L"]
    is_token: Bool[np.ndarray, "n L"]
    """False at padding."""


Metric = Callable[[Batch], Float64[np.ndarray, " n"]]


def effective_lengths(
    is_token: Bool[np.ndarray, "n L"],
) -> Int64[np.ndarray, " n"]:
    """Counts the tokens of each sample, without padding.

    Example:
        >>> effective_lengths(np.array([[True, True, False]])).tolist()
        [2]

    Reference:
        arXiv:2212.03597, metric `seqreo`.
    """
    return is_token.sum(axis=1, dtype=np.int64)


def surprisals(counts: Int64[np.ndarray, " V"]) -> Float64[np.ndarray, " V"]:
    """Computes -ln p of each token id from counts in a corpus; counts of 0 are 1."""
    # -ln 0 would be infinite.
    counts = np.maximum(counts, 1)
    return np.log(counts.sum() / counts)


def vocabulary_rarity(
    tokens: Int[np.ndarray, "n L"],
    is_token: Bool[np.ndarray, "n L"],
    surprisal: Float64[np.ndarray, " V"],
) -> Float64[np.ndarray, " n"]:
    """Computes the integer part of the sum of -ln p over the tokens of each sample.

    Example:
        >>> tokens, surprisal = np.array([[0, 1, 1]]), np.array([0.5, 2.25])
        >>> vocabulary_rarity(tokens, tokens >= 0, surprisal).tolist()
        [5.0]

    Reference:
        arXiv:2212.03597, metric `voc`.
    """
    return np.floor(np.where(is_token, surprisal[tokens], 0.0).sum(axis=1))


def length_scale(max_rarity: float) -> int:
    """Factor of the length in `seqreo_voc`: a power of 10 above every rarity.

    Example:
        >>> length_scale(999.0), length_scale(1000.5)
        (10000, 100000)
    """
    return 10 ** (math.ceil(math.log10(max(max_rarity, 1.0))) + 1)


def compression_ratios(
    tokens: Int[np.ndarray, "n L"], is_token: Bool[np.ndarray, "n L"], vocab_size: int
) -> Float64[np.ndarray, " n"]:
    """Divides the compressed by the original size of each sample: repetition is easy.

    zlib (level 6) compresses token ids, as little-endian numbers of 1, 2 or 4 bytes,
    the least that hold the vocabulary: no tokenizer is needed. A sample of padding
    alone has ratio 0.
    """
    dtype = np.min_scalar_type(vocab_size - 1).newbyteorder("<")
    ratios = np.zeros(len(tokens))
    for sample, (row, kept) in enumerate(zip(tokens, is_token, strict=True)):
        original = row[kept].astype(dtype).tobytes()
        if original:
            # Another level would give other values than indexes on disk have.
            ratios[sample] = len(zlib.compress(original, 6)) / len(original)
    return ratios


def needs_counts(name: str) -> bool:
    """Whether a metric reads how often each token occurs in the dataset."""
    return name in ("voc", "seqreo_voc")


def make_metric(
    name: str,
    *,
    length: int,
    vocab_size: int,
    counts: Int64[np.ndarray, " V"] | None = None,
) -> Metric:
    """Makes the function of a metric, which checks every value.

    `length` is tokens per sample, with padding. `counts` is needed for `voc` and
    `seqreo_voc`.
    """
    compute = _choose(name, length, vocab_size, counts)

    def checked(batch: Batch) -> Float64[np.ndarray, " n"]:
        values = compute(batch)
        for number in batch.numbers[~(np.isfinite(values) & (values >= 0))][:1]:
            value = values[batch.numbers == number][0]
            problem = f"gives {value} for sample {number}"
            remedy = "return a finite number of 0 or more"
            raise DataError(Problem("metrics", name, problem, remedy))
        return values

    return checked


def load_function(name: str) -> Callable[[Any], Any]:
    """Imports the user's function `module:function`."""
    if not is_function_name(name):
        remedy = f"use {', '.join(METRICS)} or module:function"
        raise DataError(Problem("metrics", name, "is not a metric", remedy))
    found = find_function(name)
    if isinstance(found, Fault):
        raise DataError(Problem("metrics", name, found.problem, found.remedy))
    return found


def _choose(
    name: str, length: int, vocab_size: int, counts: Int64[np.ndarray, " V"] | None
) -> Metric:
    """Chooses the function of a metric by name."""
    match name:
        case "seqreo":
            return lambda batch: effective_lengths(batch.is_token).astype(np.float64)
        case "compression":
            return lambda batch: compression_ratios(
                batch.tokens, batch.is_token, vocab_size
            )
        case "voc" | "seqreo_voc":
            assert counts is not None
            return _make_rarity(name, length, surprisals(counts))
    return _wrap_function(name)


def _make_rarity(
    name: str, length: int, surprisal: Float64[np.ndarray, " V"]
) -> Metric:
    """Makes the function of `voc` or `seqreo_voc`."""
    scale = length_scale(length * surprisal.max()) if name == "seqreo_voc" else 0
    # Beyond, float64 would round the rarity away.
    if (length + 1) * scale > MAX_EXACT:
        problem = f"reaches {length * scale:,} with samples of {length} tokens"
        remedy = f"use shorter samples: numbers above {MAX_EXACT:,} are not exact"
        raise DataError(Problem("metrics", name, problem, remedy))

    def compute(batch: Batch) -> Float64[np.ndarray, " n"]:
        rarity = vocabulary_rarity(batch.tokens, batch.is_token, surprisal)
        # Sorts by length first, then by rarity.
        return effective_lengths(batch.is_token) * scale + rarity

    return compute


def _wrap_function(name: str) -> Metric:
    """Makes a metric of the user's function, with errors that name the sample."""
    function = load_function(name)

    def call(number: int, tokens: np.ndarray) -> float:
        try:
            return float(function(tokens))
        except Exception as error:
            problem = f"fails on sample {number} ({type(error).__name__}: {error})"
            remedy = "return a finite number of 0 or more"
            raise DataError(Problem("metrics", name, problem, remedy)) from error

    def compute(batch: Batch) -> Float64[np.ndarray, " n"]:
        rows = zip(batch.numbers.tolist(), batch.tokens, batch.is_token, strict=True)
        return np.array([call(number, row[kept]) for number, row, kept in rows])

    return compute
