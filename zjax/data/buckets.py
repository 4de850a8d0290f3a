"""Documents in buckets of one length each, none of whose rows holds two documents.

`cut` splits each document into pieces of powers of two, the longest first, so that no
token is padding; `pad` takes documents whole, up to the longest row. A batch comes from
one bucket, and all batches have equally many tokens.

Reference: Pouransari et al., Dataset Decomposition (arXiv:2405.13226), section 2.
"""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64

from zjax.data.draws import Draw, Sampler, permute_rows
from zjax.data.packing import TokenArray, split_documents, stack_pieces
from zjax.data.sums import digest_tokens
from zjax.errors import DataError, Problem
from zjax.schedule.buckets import bucket_lengths, bucket_picks, bucket_rows
from zjax.schedule.pacing import settings_read
from zjax.settings import schema

_EPOCHS, _ROWS = 3, 4
"""Purposes of random numbers."""
_EPOCHS_KEPT = 2
_SEARCHED_STEPS = 10_000
"""Steps searched for the first batch of each bucket."""


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Parts of documents.

    Example:
        >>> pieces = cut_documents(np.array([0, 7, 8]), shortest=2, longest=4)
        >>> pieces.starts.tolist(), pieces.sizes.tolist(), pieces.ends.tolist()
        ([0, 4], [4, 2], [False, False])
    """

    starts: Int64[np.ndarray, " pieces"]
    """First token."""
    sizes: Int64[np.ndarray, " pieces"]
    """Tokens."""
    ends: Bool[np.ndarray, " pieces"]
    """Whether its document ends there."""


def cut_documents(
    offsets: Int64[np.ndarray, " offsets"], shortest: int, longest: int
) -> Pieces:
    """Cuts documents into pieces of `shortest` times powers of two.

    A document has as many of `longest` as fit, then at most one of each shorter length;
    a tail shorter than `shortest` is left out.
    """
    sizes = np.diff(offsets)
    documents = np.arange(len(sizes))
    counts = sizes // longest
    firsts = np.repeat(documents, counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    found = [(firsts, within * longest, np.full(len(firsts), longest))]
    length = longest // 2
    while length >= shortest:
        chosen = documents[sizes // length % 2 == 1]
        places = sizes[chosen] // (2 * length) * (2 * length)
        found.append((chosen, places, np.full(len(chosen), length)))
        length //= 2
    owners, places, lengths = (
        np.concatenate(columns) for columns in zip(*found, strict=True)
    )
    starts = offsets[owners] + places
    return Pieces(starts, lengths, starts + lengths == offsets[owners + 1])


class BucketRows:
    """Rows of one bucket: one piece each, with padding if it is shorter.

    Args:
        tokens: Token stream.
        pieces: Pieces of at most `length` tokens.
        length: Tokens per row.
    """

    def __init__(self, tokens: TokenArray, pieces: Pieces, length: int):
        self._tokens, self._pieces, self._length = tokens, pieces, length

    def __len__(self) -> int:
        return len(self._pieces.starts)

    def read(self, indices: Int64[np.ndarray, " n"], /) -> dict[str, np.ndarray]:
        """Reads `tokens`, `targets` (int32) and `weights`, 0 where a document ends."""
        columns = self._pieces.starts, self._pieces.sizes, self._pieces.ends
        pieces = zip(*(column[indices].tolist() for column in columns), strict=True)
        rows = [
            [(self._tokens[start : start + size + (not is_end)], is_end)]
            for start, size, is_end in pieces
        ]
        batch = stack_pieces(rows, self._length)
        return {name: batch[name] for name in ("tokens", "targets", "weights")}

    def digest(self) -> str:
        """Checksum of the stream."""
        return digest_tokens(self._tokens)


class EpochOrder:
    """Each batch of an epoch once; the pieces that fill none differ by epoch.

    Args:
        seed: Seed, 0 or more.
        num_pieces: Pieces of each bucket, enough for a batch.
        batch_rows: Rows of a batch of each bucket.
        odds: While a cycle has batches of a bucket, its odds to be next; None draws all
            batches of an epoch in random order.
        num_cycles: Equal parts of an epoch, each of which draws from all buckets.
    """

    def __init__(
        self,
        seed: int,
        num_pieces: tuple[int, ...],
        batch_rows: tuple[int, ...],
        odds: tuple[float, ...] | None,
        num_cycles: int,
    ):
        self._seed, self._num_pieces, self._batch_rows = seed, num_pieces, batch_rows
        self._odds, self._num_cycles = odds, num_cycles
        pairs = zip(num_pieces, batch_rows, strict=True)
        self._num_batches = [pieces // rows for pieces, rows in pairs]
        self._epochs: dict[int, np.ndarray] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Batches of all buckets."""
        return sum(self._num_batches)

    def bucket(self, step: int) -> int:
        """Number of the bucket of a step, from 0 on."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return int(self._order(epoch)[place])

    def rows(self, step: int) -> Int64[np.ndarray, " B"]:
        """Rows of that bucket."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = self._order(epoch)
        bucket = int(order[place])
        first = int((order[:place] == bucket).sum()) * self._batch_rows[bucket]
        places = np.arange(first, first + self._batch_rows[bucket])
        key = (self._seed, _ROWS, bucket)
        return permute_rows(places, self._num_pieces[bucket], key, epoch)

    def _order(self, epoch: int) -> np.ndarray:
        """Buckets of the steps of an epoch."""
        known = dict(self._epochs)  # threads may change the other
        if epoch not in known:
            generator = np.random.default_rng([self._seed, _EPOCHS, epoch])
            if self._odds is None:
                buckets = np.arange(len(self._num_batches))
                drawn = generator.permutation(np.repeat(buckets, self._num_batches))
            else:
                drawn = _draw_cycles(
                    generator, self._num_batches, self._odds, self._num_cycles
                )
            recent = sorted(known)[1 - _EPOCHS_KEPT :]
            self._epochs = {e: known[e] for e in recent} | {epoch: drawn}
            return drawn
        return known[epoch]


def _draw_cycles(
    generator: np.random.Generator,
    num_batches: list[int],
    odds: tuple[float, ...],
    num_cycles: int,
) -> Int64[np.ndarray, " steps"]:
    """Buckets by step: in a cycle each is next by its odds while it has batches.

    That is the order of events of independent Poisson processes whose rates are the
    odds, each of which stops after its batches.
    """
    parts = []
    for cycle in range(num_cycles):
        times, buckets = [], []
        for bucket, (number, rate) in enumerate(zip(num_batches, odds, strict=True)):
            count = number * (cycle + 1) // num_cycles - number * cycle // num_cycles
            times.append(np.cumsum(generator.exponential(1 / rate, count)))
            buckets.append(np.full(count, bucket))
        parts.append(np.concatenate(buckets)[np.argsort(np.concatenate(times))])
    return np.concatenate(parts)


class MixtureOrder:
    """A bucket by its weight in each step; each bucket has epochs of its own.

    Args:
        config: Read for `buckets`, `data.length`, `seed` and `global_batch_size`.
        num_pieces: Pieces of each bucket, enough for a batch.
    """

    def __init__(self, config: schema.Config, num_pieces: tuple[int, ...]):
        self._picks = bucket_picks(config)
        self._samplers = [
            Sampler((config.seed, _ROWS, bucket), num, rows)
            for bucket, (num, rows) in enumerate(
                zip(num_pieces, bucket_rows(config), strict=True)
            )
        ]

    def bucket(self, step: int) -> int:
        """Number of the bucket of a step, from 0 on."""
        return int(self._picks.at(step).parts[0])

    def rows(self, step: int) -> Int64[np.ndarray, " B"]:
        """Rows of that bucket."""
        picked = self._picks.at(step)
        return self._samplers[picked.parts[0]].indices(int(picked.ordinals[0]))


class Buckets:
    """The buckets of a run, as `Draws`.

    Args:
        tokens: Token stream.
        offsets: Start of each document, and the end of the last.
        config: Read for `buckets`, `data.length`, `seed` and `global_batch_size`.

    Raises:
        DataError: A bucket has no document, or too few for a batch.
    """

    def __init__(
        self,
        tokens: TokenArray,
        offsets: Int64[np.ndarray, " offsets"],
        config: schema.Config,
    ):
        settings, lengths = config.buckets, bucket_lengths(config)
        pieces = _find_pieces(offsets, settings.form, lengths)
        self._num_tokens, self._num_used = len(tokens), int(pieces.sizes.sum())
        self._lengths, self._batch_rows = lengths, bucket_rows(config)
        self._form = settings.form
        self._buckets: list[BucketRows] = []
        of_piece = np.searchsorted(lengths, pieces.sizes)
        for number, length in enumerate(lengths):
            chosen = of_piece == number
            columns = pieces.starts[chosen], pieces.sizes[chosen], pieces.ends[chosen]
            self._buckets.append(BucketRows(tokens, Pieces(*columns), length))
        self._check_filled()
        num_pieces = tuple(map(len, self._buckets))
        self._order = _make_order(config, num_pieces, self._batch_rows)
        self.position: dict[str, Any] = {"buckets.shortest": settings.shortest}
        """Values that determine the batches, compared at resume."""
        for name in ("form", "order", "num_cycles"):
            self.position[f"buckets.{name}"] = getattr(settings, name)
        self.position["buckets.weights"] = list(settings.weights)
        if settings.order == "pacing":
            self.position |= settings_read("buckets.pacing", settings.pacing)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of rows that batches have."""
        return self._batch_rows

    def draw(self, step: int) -> Draw:
        """The batch of a step, from 0 on."""
        return Draw(self._buckets[self._order.bucket(step)], self._order.rows(step))

    def values(self, step: int) -> dict[str, float]:
        """Tokens per row of a step, from 1 on."""
        return {"sequence_length": float(self._lengths[self._order.bucket(step - 1)])}

    def shapes(self, step: int) -> dict[int, tuple[int, int]]:
        """Rows and tokens per row, by the first step after some that has them."""
        found: dict[int, int] = {}
        for number in range(step, step + _SEARCHED_STEPS):
            if len(found) == len(self._lengths):
                break
            found.setdefault(self._order.bucket(number), number + 1)
        return {
            first: (self._batch_rows[bucket], self._lengths[bucket])
            for bucket, first in found.items()
        }

    def describe(self) -> str:
        """Rows by length, and the tokens that are left out."""
        rows = zip(map(len, self._buckets), self._lengths, strict=True)
        listed = ", ".join(f"{number:,} x {length}" for number, length in rows)
        left = self._num_tokens - self._num_used
        share = left / self._num_tokens
        text = f"buckets: {listed}; {left:,} tokens ({share:.1%}) are tails shorter "
        text += f"than {self._lengths[0]} and left out"
        if self._form == "pad":
            text = f"buckets: {listed}; no token is left out"
        spare = sum(
            len(bucket) % rows
            for bucket, rows in zip(self._buckets, self._batch_rows, strict=True)
        )
        return f"{text}; {spare:,} rows fill no batch of an epoch, others in each"

    def _check_filled(self) -> None:
        problems = [
            Problem(
                *(
                    ("data.length", self._lengths[-1])
                    if number
                    else ("buckets.shortest", length)
                ),
                f"leaves {len(rows)} rows to the bucket of {length} tokens, fewer than "
                f"the {needed} of a batch"
                if len(rows)
                else f"leaves no document to the bucket of {length} tokens",
                "use other lengths, a smaller batch, or more documents",
            )
            for number, (rows, length, needed) in enumerate(
                zip(self._buckets, self._lengths, self._batch_rows, strict=True)
            )
            if len(rows) < needed
        ]
        if problems:
            raise DataError(*problems)


def _find_pieces(
    offsets: Int64[np.ndarray, " offsets"], form: str, lengths: tuple[int, ...]
) -> Pieces:
    if form == "cut":
        return cut_documents(offsets, lengths[0], lengths[-1])
    return Pieces(*split_documents(offsets, lengths[-1]))


def _make_order(
    config: schema.Config, num_pieces: tuple[int, ...], batch_rows: tuple[int, ...]
) -> EpochOrder | MixtureOrder:
    settings, odds = config.buckets, None
    if settings.order in ("mixture", "pacing"):
        return MixtureOrder(config, num_pieces)
    if settings.order == "grow":
        falling = tuple(2.0**-number for number in range(len(batch_rows)))
        odds = settings.weights or falling
    return EpochOrder(config.seed, num_pieces, batch_rows, odds, settings.num_cycles)
