"""Rows of whole examples: the completions of a prompt are segments of one row.

A loss that compares completions is then a sum over rows, and neither microbatches nor
devices split an example.
"""

import dataclasses

import numpy as np
from jaxtyping import Float64, Int64

from zjax.data.packing import TokenArray, pack_first_fit, stack_pieces
from zjax.data.store import Store
from zjax.data.sums import digest_tokens, token_parts

EXAMPLES, DESIRABLE, REFERENCE = "examples", "desirable", "reference_logprobs"
"""Names of the arrays of examples in a batch."""


class ExampleRows:
    """Examples packed into rows of `length` tokens, by first-fit.

    An example that is longer than a row is left out: a cut completion is not what was
    compared.

    Args:
        opened: Documents, and the examples that they make.
        length: Tokens of a row.

    Attributes:
        num_left_out: Number of examples that are longer than a row.
    """

    def __init__(self, opened: Store, length: int):
        assert opened.examples is not None
        self.opened, self._length, self._starts = opened, length, opened.examples
        sizes = np.diff(opened.offsets[self._starts])
        numbers = np.flatnonzero(sizes <= length)
        self.num_left_out = len(sizes) - len(numbers)
        rows = pack_first_fit(sizes[numbers], length)
        order = np.argsort(rows, kind="stable")
        numbers, rows = numbers[order], rows[order]
        counts = np.bincount(rows) if len(rows) else np.zeros(0, np.int64)
        places = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._table = np.full((len(counts), counts.max(initial=0)), -1, np.int64)
        """Numbers of the examples of each row, -1 behind the last."""
        self._table[rows, places] = numbers
        self._most = int(np.diff(self._starts)[numbers].max(initial=0))

    def __len__(self) -> int:
        return len(self._table)

    def read(self, indices: Int64[np.ndarray, " n"], /) -> dict[str, np.ndarray]:
        """Reads the fields of `DocumentRows`, and the segments of each example.

        `examples` int32[n, P, K] has the segment of completion k of example p of each
        row, the best first, and 0 where there is none. `desirable` int32[n, P] has the
        labels of examples, if there are any.
        """
        numbers, documents = self._table[indices], self.documents(indices)
        batch = self._stack(self.opened.tokens, documents)
        # A target has a loss if it is a token of a completion.
        answers = self.opened.answers
        assert answers is not None
        batch["weights"] *= self._stack(answers, documents)["targets"]
        is_real = (documents >= 0).reshape(len(indices), -1)
        segments = np.where(is_real, np.cumsum(is_real, axis=1), 0)
        batch[EXAMPLES] = segments.reshape(documents.shape).astype(np.int32)
        if self.opened.labels is not None:
            labels = np.where(numbers >= 0, self.opened.labels[numbers], 0)
            batch[DESIRABLE] = labels.astype(np.int32)
        return batch

    def documents(self, indices: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, "n P K"]:
        """Numbers of the documents of each example of rows; -1 where there is none."""
        numbers = self._table[indices][..., None]
        found = self._starts[numbers] + np.arange(self._most)
        is_real = (numbers >= 0) & (found < self._starts[numbers + 1])
        return np.where(is_real, found, -1)

    def digest(self) -> str:
        """Checksum of tokens, documents, answers, examples and labels."""
        opened = self.opened
        assert opened.answers is not None
        labels = () if opened.labels is None else (opened.labels,)
        parts = *token_parts(opened.answers), self._starts, *labels
        return digest_tokens(opened.tokens, opened.offsets, *parts)

    def _stack(
        self, stream: TokenArray, documents: Int64[np.ndarray, "n P K"]
    ) -> dict[str, np.ndarray]:
        """Packs the documents of rows, in the order of their segments."""
        offsets = self.opened.offsets
        rows = [
            [(stream[offsets[n] : offsets[n + 1]], True) for n in row[row >= 0]]
            for row in documents
        ]
        return stack_pieces(rows, self._length)


@dataclasses.dataclass(frozen=True)
class ReferencedRows:
    """Examples with log-probabilities of a reference model.

    Args:
        rows: Rows of examples.
        sums: Log-probability of the completion of each document.
        reference: Digest of the reference model, of 16 hexadecimal digits.
    """

    rows: ExampleRows
    sums: Float64[np.ndarray, " documents"]
    reference: str

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, indices: Int64[np.ndarray, " n"], /) -> dict[str, np.ndarray]:
        """Reads rows, with `reference_logprobs` float32[n, P, K] of completions."""
        documents = self.rows.documents(indices)
        sums = np.where(documents >= 0, self.sums[documents], 0).astype(np.float32)
        return self.rows.read(indices) | {REFERENCE: sums}

    def digest(self) -> str:
        """Checksum of the rows, and the digest of the reference model."""
        return f"{self.rows.digest()}-{self.reference}"
