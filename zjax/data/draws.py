"""Rows of each step as a pure function of (seed, step); rows cut for length warm-up.

Resuming is arithmetic: nothing but the step is saved.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64, UInt64

from zjax.data.packing import Rows
from zjax.schedule.training import TrainingSchedule

# With fewer rounds some orders of few rows never come; resumed runs need this number.
NUM_ROUNDS = 8
_MAX_CIPHERS = 65_536
"""Permutations with cached keys."""


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Rows of the global batch of each step, shuffled anew in each epoch.

    Args:
        num_rows: Rows per epoch, 1 or more.
        global_batch_size: Rows per step, 1 or more; a batch may straddle two epochs.
    """

    seed: int | tuple[int, ...]
    num_rows: int
    global_batch_size: int

    def indices(self, step: int) -> Int64[np.ndarray, " B"]:
        """Rows of one step, in batch order."""
        first = step * self.global_batch_size
        positions = np.arange(first, first + self.global_batch_size, dtype=np.int64)
        epochs, positions_in_epoch = np.divmod(positions, self.num_rows)
        rows = [
            permute_rows(
                positions_in_epoch[epochs == epoch],
                self.num_rows,
                self.seed,
                int(epoch),
            )
            for epoch in range(epochs[0], epochs[-1] + 1)
        ]
        return np.concatenate(rows)


def permute_rows(
    positions: Int64[np.ndarray, " n"],
    num_rows: int,
    seed: int | tuple[int, ...],
    epoch: int,
) -> Int64[np.ndarray, " n"]:
    """Applies an epoch's permutation to positions below `num_rows` (up to 2**62).

    `seed` may be several numbers, such as a seed and the number of a part.
    """
    key = seed if isinstance(seed, tuple) else (seed,)
    which, sizes = np.zeros(len(positions), np.int64), np.array([num_rows])
    return permute_parts(positions, which, sizes, [(*key, epoch)])


def permute_parts(
    positions: Int64[np.ndarray, " n"],
    permutations: Int64[np.ndarray, " n"],
    sizes: Int64[np.ndarray, " permutations"],
    keys: Sequence[tuple[int, ...]],
) -> Int64[np.ndarray, " n"]:
    """Applies one of several permutations to each position; see `permute_rows`.

    Each position is below the size of the permutation. `keys` choose the permutations,
    by numbers such as a seed, a part and an epoch.

    Example:
        >>> which, sizes = np.array([0, 0, 0, 1]), np.array([3, 1])
        >>> rows = permute_parts(np.array([0, 1, 2, 0]), which, sizes, [(0, 0), (0, 1)])
        >>> sorted(rows[:3].tolist()), int(rows[3])
        ([0, 1, 2], 0)
    """
    ciphers = [_cipher(*pair) for pair in zip(sizes.tolist(), keys, strict=True)]
    half_bits, round_keys = (np.stack(x, axis=-1) for x in zip(*ciphers, strict=True))
    values, ends = positions.astype(np.uint64), sizes.astype(np.uint64)[permutations]
    todo = np.arange(len(values))
    # Cycle walking: values beyond the size are encrypted again, until all are rows.
    while len(todo):
        each = permutations[todo]
        values[todo] = _feistel(values[todo], half_bits[each], round_keys[:, each])
        todo = todo[values[todo] >= ends[todo]]
    return values.astype(np.int64)


@functools.lru_cache(_MAX_CIPHERS)
def _cipher(
    size: int, key: tuple[int, ...]
) -> tuple[np.uint64, UInt64[np.ndarray, " rounds"]]:
    """Bits of half a position, and the keys of the rounds."""
    # The network permutes the next power of 4: a row takes 4 tries on average at most.
    half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    return half_bits, np.random.SeedSequence(key).generate_state(NUM_ROUNDS, np.uint64)


def _feistel(
    values: UInt64[np.ndarray, " n"],
    half_bits: UInt64[np.ndarray, " n"],
    round_keys: UInt64[np.ndarray, "rounds n"],
) -> UInt64[np.ndarray, " n"]:
    """Encrypts positions by a Feistel network, a bijection of 2 * half_bits bits."""
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for key in round_keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << half_bits) | right


def _mix(values: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    """Mixes bits by the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    # uint64 constants: with int64, NumPy would promote to float64.
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Draw(NamedTuple):
    """Rows of one global batch."""

    rows: Rows
    indices: Int64[np.ndarray, " B"]
    """Numbers of the rows in the source, in batch order."""


@runtime_checkable
class Order(Protocol):
    """Rows of the global batch of each step."""

    def indices(self, step: int) -> Int64[np.ndarray, " B"]:
        """Rows of one step, in batch order."""
        ...


@runtime_checkable
class Draws(Protocol):
    """Global batch of each step, from rows that may differ by step."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of rows that batches can have."""
        ...

    def draw(self, step: int) -> Draw:
        """Draws the batch of a step, from 0 on."""
        ...


@dataclasses.dataclass(frozen=True)
class WholeRows:
    """Draws whole rows in an order."""

    rows: Rows
    order: Order
    sizes: tuple[int, ...]

    def draw(self, step: int) -> Draw:
        """Draws the rows of the order."""
        return Draw(self.rows, self.order.indices(step))


@dataclasses.dataclass(frozen=True)
class TruncatedRows:
    """Draws the first tokens of rows in an order: `seqtru` of arXiv:2212.03597."""

    rows: Rows
    order: Order
    schedule: TrainingSchedule

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of rows of all batches."""
        return tuple({rows for rows, _ in self.schedule.shapes})

    def draw(self, step: int) -> Draw:
        """Draws the rows of the order, cut to the length of the step."""
        length = self.schedule.at(step + 1).length
        return Draw(FirstTokens(self.rows, length), self.order.indices(step))


@dataclasses.dataclass(frozen=True)
class ReshapedRows:
    """Draws rows in an order, cut into short rows: `seqres` of arXiv:2212.03597."""

    rows: Rows
    order: Order
    full: int
    """Tokens per whole row."""
    schedule: TrainingSchedule

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of rows of all shapes."""
        return tuple(rows for rows, _ in self.schedule.shapes)

    def draw(self, step: int) -> Draw:
        """Draws pieces of the rows of the order, as many as the shape has rows.

        The first pieces of all rows come first; pieces left out are the last of a row.
        """
        num_rows, length, *_ = self.schedule.at(step + 1)
        pieces = Pieces(self.rows, length, self.full)
        places = np.arange(pieces.per_row)[:, None]
        numbers = self.order.indices(step) * pieces.per_row + places
        return Draw(pieces, numbers.reshape(-1)[:num_rows])


@dataclasses.dataclass(frozen=True)
class FirstTokens:
    """Rows cut to the first tokens."""

    rows: Rows
    length: int

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, indices: Int64[np.ndarray, " n"], /) -> dict[str, np.ndarray]:
        """Reads rows and cuts each field."""
        read = self.rows.read(indices)
        return {name: x[:, : self.length] for name, x in read.items()}

    def digest(self) -> str:
        """Checksum of the uncut rows."""
        return self.rows.digest()


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Rows cut into pieces, numbered row by row.

    A row of n tokens, with the last target, has floor(n / (length + 1)) pieces of
    `length` inputs and a target. If n leaves a remainder, one more piece at the end
    overlaps the piece before.
    """

    rows: Rows
    length: int
    full: int

    @property
    def per_row(self) -> int:
        """Pieces of each row."""
        return -(-(self.full + 1) // (self.length + 1))

    def __len__(self) -> int:
        return len(self.rows) * self.per_row

    def read(self, indices: Int64[np.ndarray, " n"], /) -> dict[str, np.ndarray]:
        """Reads pieces; each row is read once."""
        numbers, places = np.divmod(indices, self.per_row)
        unique, inverse = np.unique(numbers, return_inverse=True)
        # The last piece starts earlier, so that it has full length.
        starts = np.minimum(places * (self.length + 1), self.full - self.length)
        columns = starts[:, None] + np.arange(self.length)
        read = self.rows.read(unique)
        return {name: x[inverse[:, None], columns] for name, x in read.items()}

    def digest(self) -> str:
        """Checksum of the uncut rows."""
        return self.rows.digest()
