"""The order of samples: a pure function of (seed, step), so resuming is arithmetic.

Every epoch is a new permutation of the rows, computed point by point by a Feistel
network over the next power of four, cycle-walking back into range: nothing is stored,
however many rows there are, and processes need not communicate.

Reference: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002).
"""

import dataclasses

import numpy as np
from jaxtyping import Int64, UInt64

NUM_ROUNDS = 8


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
    half_bits = np.uint64(max(1, ((num_rows - 1).bit_length() + 1) // 2))
    key = seed if isinstance(seed, tuple) else (seed,)
    round_keys = np.random.SeedSequence([*key, epoch]).generate_state(
        NUM_ROUNDS, np.uint64
    )
    rows = _feistel(positions.astype(np.uint64), half_bits, round_keys)
    while (outside := rows >= np.uint64(num_rows)).any():
        rows[outside] = _feistel(rows[outside], half_bits, round_keys)
    return rows.astype(np.int64)


def _feistel(
    values: UInt64[np.ndarray, " n"],
    half_bits: np.uint64,
    round_keys: UInt64[np.ndarray, " rounds"],
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
