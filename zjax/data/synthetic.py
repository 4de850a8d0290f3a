"""Synthetic tokens computed from (seed, row), with structure to learn.

Each token is its predecessor plus a fixed stride, except that one in eight is random. A
model that has learnt the stride reaches a loss of about `H(1/8) + log(vocab_size) / 8`
nats, where H(1/8) = 0.38.
"""

import numpy as np
from jaxtyping import Int64

from zjax.data import packing

NUM_ROWS = 1 << 40
"""Rows per epoch; no run finishes one."""
JUMP_PROBABILITY = 1 / 8
DOCUMENTS_PER_ROW = 4


class SyntheticRows:
    """Rows with the fields of `packing.BlockRows` or `packing.DocumentRows`.

    Args:
        seed: Seed of the sample, 0 or more; the stride depends on the vocabulary alone.
        split: `train` or `validation`, whose rows differ.
        vocab_size: Number of tokens.
        length: Tokens per row.
        num_documents: Documents per row; 0 gives blocks, without segments.
    """

    def __init__(
        self, seed: int, split: str, vocab_size: int, length: int, num_documents: int
    ):
        self._entropy = [seed, int(split == "validation")]
        self._vocab_size = vocab_size
        self._length = length
        self._num_documents = min(num_documents, length)

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
        """The arguments as text."""
        numbers = [*self._entropy, self._vocab_size, self._length, self._num_documents]
        return "-".join(map(str, ["synthetic", *numbers]))

    def _walk(self, row: int) -> np.ndarray:
        """`length + 1` tokens: random jumps, and steps of the stride between them."""
        generator = np.random.default_rng([*self._entropy, row])
        positions = np.arange(self._length + 1)
        jumps = generator.random(self._length + 1) < JUMP_PROBABILITY
        last_jump = np.maximum.accumulate(np.where(jumps, positions, 0))
        random_tokens = generator.integers(self._vocab_size, size=self._length + 1)
        stride = self._vocab_size // 3 + 1
        walk = random_tokens[last_jump] + (positions - last_jump) * stride
        return (walk % self._vocab_size).astype(np.int32)

    def _documents(self, row: int) -> list[tuple[np.ndarray, bool]]:
        generator = np.random.default_rng([*self._entropy, row, 1])
        inside = np.arange(1, self._length)
        cuts = generator.choice(inside, self._num_documents - 1, replace=False)
        pieces = np.split(self._walk(row)[: self._length], np.sort(cuts))
        return [(piece, True) for piece in pieces]
