"""Buckets of documents by length: each row holds tokens of one document.

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
from zjax.schedule.dropping import Picks
from zjax.schedule.pacing import settings_read
from zjax.settings import choices, schema

_EPOCHS, _ROWS = 3, 4
"""Domains of random numbers, so that draws for different purposes are independent."""
# Threads that prefetch may read the end of one epoch and the start of the next.
_EPOCHS_KEPT = 2


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Parts of documents in a token stream."""

    starts: Int64[np.ndarray, " pieces"]
    """Index of the first token in the stream."""
    sizes: Int64[np.ndarray, " pieces"]
    ends: Bool[np.ndarray, " pieces"]
    """Whether the document ends with the piece."""


def cut_documents(
    offsets: Int64[np.ndarray, " offsets"], shortest: int, longest: int
) -> Pieces:
    """Cuts documents into pieces of `shortest` times powers of two.

    A document has as many pieces of `longest` tokens as fit, then at most one of each
    shorter length; a tail shorter than `shortest` is left out. `longest` is `shortest`
    times a power of two.
    """
    sizes = np.diff(offsets)
    documents = np.arange(len(sizes))
    counts = sizes // longest
    firsts = np.repeat(documents, counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    found = [(firsts, within * longest, np.full(len(firsts), longest))]
    length = longest // 2
    while length >= shortest:
        # The binary digits of the length say which pieces a document has.
        chosen = documents[sizes // length % 2 == 1]
        # Behind all longer pieces of the document.
        places = sizes[chosen] // (2 * length) * (2 * length)
        found.append((chosen, places, np.full(len(chosen), length)))
        length //= 2
    owners, places, lengths = (
        np.concatenate(columns) for columns in zip(*found, strict=True)
    )
    starts = offsets[owners] + places
    return Pieces(starts, lengths, starts + lengths == offsets[owners + 1])


class BucketRows:
    """Rows of one bucket, with one piece each; shorter pieces are padded."""

    def __init__(self, tokens: TokenArray, pieces: Pieces, length: int):
        self._tokens, self._pieces, self._length = tokens, pieces, length

    def __len__(self) -> int:
        return len(self._pieces.starts)

    def read(self, indices: Int64[np.ndarray, " n"], /) -> dict[str, np.ndarray]:
        """Reads `tokens`, `targets` (int32) and `weights`, 0 where a document ends."""
        columns = self._pieces.starts, self._pieces.sizes, self._pieces.ends
        pieces = zip(*(column[indices].tolist() for column in columns), strict=True)
        rows = [
            # A piece inside a document has one more token, the last target.
            [(self._tokens[start : start + size + (not is_end)], is_end)]
            for start, size, is_end in pieces
        ]
        batch = stack_pieces(rows, self._length)
        return {name: batch[name] for name in ("tokens", "targets", "weights")}

    def digest(self) -> str:
        """Checksum of the token stream."""
        return digest_tokens(self._tokens)


class EpochOrder:
    """Order that takes each batch of an epoch once; left-over pieces differ by epoch.

    Args:
        num_pieces: Number of pieces of each bucket, enough for a batch.
        batch_rows: Rows per batch of each bucket.
        odds: Odds of each bucket to be drawn next, while a cycle has batches of the
            bucket; None draws all batches of an epoch in random order.
        num_cycles: Equal parts of an epoch, each of which draws from all buckets.
    """

    def __init__(
        self,
        seed: int,
        num_pieces: tuple[int, ...],
        batch_rows: tuple[int, ...],
        odds: tuple[float, ...] | None = None,
        num_cycles: int = 1,
    ):
        self._seed, self._num_pieces, self._batch_rows = seed, num_pieces, batch_rows
        self._odds, self._num_cycles = odds, num_cycles
        pairs = zip(num_pieces, batch_rows, strict=True)
        self._num_batches = [pieces // rows for pieces, rows in pairs]
        self._epochs: dict[int, np.ndarray] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Batches of all buckets in an epoch."""
        return sum(self._num_batches)

    def bucket(self, step: int) -> int:
        """Number of the bucket of a step, from 0 on."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return int(self._order(epoch)[place])

    def rows(self, step: int) -> Int64[np.ndarray, " B"]:
        """Rows of the step's bucket, in batch order."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = self._order(epoch)
        bucket = int(order[place])
        first = int((order[:place] == bucket).sum()) * self._batch_rows[bucket]
        places = np.arange(first, first + self._batch_rows[bucket])
        # By bucket, so that buckets are shuffled independently.
        key = (self._seed, _ROWS, bucket)
        return permute_rows(places, self._num_pieces[bucket], key, epoch)

    def _order(self, epoch: int) -> np.ndarray:
        """Bucket of each step of an epoch, int64[steps]."""
        known = dict(self._epochs)  # a copy: other threads may replace the attribute
        if epoch not in known:
            generator = np.random.default_rng([self._seed, _EPOCHS, epoch])
            if self._odds is None:
                buckets = np.arange(len(self._num_batches))
                drawn = generator.permutation(np.repeat(buckets, self._num_batches))
            else:
                drawn = _draw_cycles(
                    generator, self._num_batches, self._odds, self._num_cycles
                )
            # The new epoch is one of the kept epochs, hence 1 -.
            recent = sorted(known)[1 - _EPOCHS_KEPT :]
            # Replaced, never changed in place, hence safe without a lock.
            self._epochs = {e: known[e] for e in recent} | {epoch: drawn}
            return drawn
        return known[epoch]


def _draw_cycles(
    generator: np.random.Generator,
    num_batches: list[int],
    odds: tuple[float, ...],
    num_cycles: int,
) -> Int64[np.ndarray, " steps"]:
    """Buckets by step; in a cycle, odds draw the next bucket with batches left.

    This is the order of events of independent Poisson processes with the odds as rates,
    each of which stops after the batches of the bucket.
    """
    parts = []
    for cycle in range(num_cycles):
        times, buckets = [], []
        for bucket, (number, rate) in enumerate(zip(num_batches, odds, strict=True)):
            # Differences of floors add up to the number of batches exactly.
            count = number * (cycle + 1) // num_cycles - number * cycle // num_cycles
            times.append(np.cumsum(generator.exponential(1 / rate, count)))
            buckets.append(np.full(count, bucket))
        parts.append(np.concatenate(buckets)[np.argsort(np.concatenate(times))])
    return np.concatenate(parts)


class MixtureOrder:
    """Order that draws a bucket by weight in each step; epochs differ by bucket."""

    def __init__(
        self,
        picks: Picks,
        seed: int,
        num_pieces: tuple[int, ...],
        batch_rows: tuple[int, ...],
    ):
        self._picks = picks
        self._samplers = [
            Sampler((seed, _ROWS, bucket), num, rows)
            for bucket, (num, rows) in enumerate(
                zip(num_pieces, batch_rows, strict=True)
            )
        ]

    def bucket(self, step: int) -> int:
        """Number of the bucket of a step, from 0 on."""
        return int(self._picks.at(step).parts[0])

    def rows(self, step: int) -> Int64[np.ndarray, " B"]:
        """Rows of the step's bucket, in batch order."""
        picked = self._picks.at(step)
        return self._samplers[picked.parts[0]].indices(int(picked.ordinals[0]))


class Buckets:
    """The buckets of a run, as `Draws`.

    Args:
        offsets: Start of each document, and the end of the last.
        config: Settings; reads `data.length`, `seed`, `global_batch_size`.

    Raises:
        DataError: A bucket has no document, or too few for a batch.
    """

    def __init__(
        self,
        tokens: TokenArray,
        offsets: Int64[np.ndarray, " offsets"],
        settings: schema.Buckets,
        config: schema.Config,
    ):
        lengths = bucket_lengths(settings.shortest, config.data.length)
        pieces = _find_pieces(offsets, settings, lengths)
        self._num_tokens, self._num_used = len(tokens), int(pieces.sizes.sum())
        self._lengths = lengths
        self._batch_rows = bucket_rows(lengths, config.global_batch_size)
        self._loses_tails = isinstance(settings, schema.Cut)
        self._buckets: list[BucketRows] = []
        # The shortest bucket that holds the piece.
        of_piece = np.searchsorted(lengths, pieces.sizes)
        for number, length in enumerate(lengths):
            chosen = of_piece == number
            columns = pieces.starts[chosen], pieces.sizes[chosen], pieces.ends[chosen]
            self._buckets.append(BucketRows(tokens, Pieces(*columns), length))
        self._check_filled()
        num_pieces = tuple(map(len, self._buckets))
        sizes = config.seed, num_pieces, self._batch_rows
        order = settings.order
        match order:
            case schema.Mixture() | schema.Paced():
                picks = bucket_picks(order, lengths, config)
                self._order = MixtureOrder(picks, *sizes)
            case schema.Grow():
                # Short rows are twice as likely to come next as rows of double length.
                falling = tuple(2.0**-number for number in range(len(lengths)))
                odds = order.weights or falling
                self._order = EpochOrder(*sizes, odds, order.num_cycles)
            case schema.Shuffle():
                self._order = EpochOrder(*sizes)
        self.position: dict[str, Any] = {"buckets": settings.kind}
        """Settings that determine the batches, compared at resume."""
        self.position["buckets.shortest"] = settings.shortest
        self.position["buckets.order"] = order.kind
        # Named for each order, as checkpoints of an earlier zjax name them.
        for name in ("num_cycles", "weights"):
            value = getattr(order, name, choices.default_of(schema.Grow, name))
            is_tuple = isinstance(value, tuple)
            self.position[f"buckets.order.{name}"] = list(value) if is_tuple else value
        if isinstance(order, schema.Paced):
            self.position |= settings_read("buckets.order.pacing", order.pacing)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of rows that batches can have."""
        return self._batch_rows

    def draw(self, step: int) -> Draw:
        """Draws the batch of a step, from 0 on."""
        return Draw(self._buckets[self._order.bucket(step)], self._order.rows(step))

    def shape_at(self, step: int) -> tuple[int, int]:
        """Rows and tokens per row of the batch of a step, from 1 on."""
        bucket = self._order.bucket(step - 1)
        return self._batch_rows[bucket], self._lengths[bucket]

    def describe(self) -> str:
        """Describes in one line the rows by length, and the tokens left out."""
        rows = zip(map(len, self._buckets), self._lengths, strict=True)
        listed = ", ".join(f"{number:,} x {length}" for number, length in rows)
        left = self._num_tokens - self._num_used
        share = left / self._num_tokens
        text = f"buckets: {listed}; {left:,} tokens ({share:.1%}) are tails shorter "
        text += f"than {self._lengths[0]} and left out"
        if not self._loses_tails:
            text = f"buckets: {listed}; no token is left out"
        spare = sum(
            len(bucket) % rows
            for bucket, rows in zip(self._buckets, self._batch_rows, strict=True)
        )
        return f"{text}; {spare:,} rows fill no batch of an epoch, others in each"

    def _check_filled(self) -> None:
        """Refuses buckets with fewer rows than a batch."""
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
    offsets: Int64[np.ndarray, " offsets"],
    settings: schema.Buckets,
    lengths: tuple[int, ...],
) -> Pieces:
    if isinstance(settings, schema.Cut):
        return cut_documents(offsets, lengths[0], lengths[-1])
    return Pieces(*split_documents(offsets, lengths[-1]))
