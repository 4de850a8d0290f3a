"""The order of samples: a pure function of (seed, step), so resuming is arithmetic.

Every epoch is a new permutation of the rows, computed point by point by a Feistel
network over the next power of four, cycle-walking back into range: nothing is stored,
however many rows there are, and processes need not communicate.

Reference: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002).
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64, UInt64

NUM_ROUNDS = 8
_MAX_CIPHERS = 65_536
"""Permutations whose keys are kept."""


@dataclasses.dataclass(frozen=True)
class Sampler:
    """The rows of the global batch of each step.

    Args:
        seed: Seed, 0 or more; or several numbers, such as a seed and that of a part.
        num_rows: Rows per epoch, 1 or more.
        global_batch_size: Rows per step, 1 or more; a batch may straddle two epochs.

    Example:
        >>> sampler = Sampler(seed=0, num_rows=5, global_batch_size=5)
        >>> sorted(sampler.indices(7).tolist())
        [0, 1, 2, 3, 4]
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

    Args:
        positions: Positions, each below the size of its permutation.
        permutations: Number of the permutation of each position.
        sizes: Size of each permutation.
        keys: Numbers that choose each permutation, such as a seed, a part and an epoch.

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
    while len(todo):
        each = permutations[todo]
        values[todo] = _feistel(values[todo], half_bits[each], round_keys[:, each])
        todo = todo[values[todo] >= ends[todo]]
    return values.astype(np.int64)


@functools.lru_cache(_MAX_CIPHERS)
def _cipher(
    size: int, key: tuple[int, ...]
) -> tuple[np.uint64, UInt64[np.ndarray, " rounds"]]:
    """Bits of the halves of a position, and the keys of the rounds."""
    half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    return half_bits, np.random.SeedSequence(key).generate_state(NUM_ROUNDS, np.uint64)


def _feistel(
    values: UInt64[np.ndarray, " n"],
    half_bits: UInt64[np.ndarray, " n"],
    round_keys: UInt64[np.ndarray, "rounds n"],
) -> UInt64[np.ndarray, " n"]:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for key in round_keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << half_bits) | right


def _mix(values: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
