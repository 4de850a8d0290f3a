"""What the global batch of each step holds: rows of some source, by number.

A pure function of the step, so that a run resumes at any step and processes need not
communicate.
"""

import dataclasses
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64

from zjax.config.pacing import Pacing
from zjax.data.packing import Rows


class Draw(NamedTuple):
    """Rows of one global batch."""

    rows: Rows
    """Where they are read."""
    indices: Int64[np.ndarray, " B"]
    """Their numbers there, in batch order."""


@runtime_checkable
class Order(Protocol):
    """The rows of the global batch of each step."""

    def indices(self, step: int) -> Int64[np.ndarray, " B"]:
        """Rows of one step, in batch order."""
        ...


@runtime_checkable
class Draws(Protocol):
    """The global batch of each step."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of rows that batches have."""
        ...

    def draw(self, step: int) -> Draw:
        """The batch of a step, from 0 on."""
        ...


@dataclasses.dataclass(frozen=True)
class WholeRows:
    """Whole rows in an order."""

    rows: Rows
    order: Order
    sizes: tuple[int, ...]

    def draw(self, step: int) -> Draw:
        """The rows of the order."""
        return Draw(self.rows, self.order.indices(step))


@dataclasses.dataclass(frozen=True)
class TruncatedRows:
    """The first tokens of rows in an order: `seqtru` of arXiv:2212.03597."""

    rows: Rows
    order: Order
    sizes: tuple[int, ...]
    lengths: Pacing
    """Tokens per row; steps count from 1."""

    def draw(self, step: int) -> Draw:
        """The rows of the order, cut to the length of the step."""
        length = self.lengths.at(step + 1)
        return Draw(FirstTokens(self.rows, length), self.order.indices(step))


@dataclasses.dataclass(frozen=True)
class ReshapedRows:
    """Rows in an order, cut into short ones: `seqres` of arXiv:2212.03597."""

    rows: Rows
    order: Order
    full: int
    """Tokens per whole row."""
    shapes: dict[int, tuple[int, int]]
    """Rows and tokens per row of batches, by their first step, which counts from 1."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of rows of all shapes."""
        return tuple(rows for rows, _ in self.shapes.values())

    def draw(self, step: int) -> Draw:
        """The pieces of the rows of the order, as many as their tokens fill.

        First pieces come first, so that those left out are the last of their rows.
        """
        first = max(first for first in self.shapes if first <= step + 1)
        num_rows, length = self.shapes[first]
        pieces = Pieces(self.rows, length, self.full)
        places = np.arange(pieces.per_row)[:, None]
        numbers = self.order.indices(step) * pieces.per_row + places
        return Draw(pieces, numbers.reshape(-1)[:num_rows])


@dataclasses.dataclass(frozen=True)
class FirstTokens:
    """The first tokens of each row."""

    rows: Rows
    length: int

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, indices: Int64[np.ndarray, " n"], /) -> dict[str, np.ndarray]:
        """Reads the rows and cuts them."""
        read = self.rows.read(indices)
        return {name: x[:, : self.length] for name, x in read.items()}

    def digest(self) -> str:
        """Checksum of the rows."""
        return self.rows.digest()


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Rows cut into pieces, whose numbers begin with those of the first row.

    A row of n tokens, with its last target, has floor(n / (length + 1)) pieces of
    `length` inputs and a target; one more at its end overlaps them if they leave a
    remainder.

    Args:
        rows: Rows of `full` inputs.
        length: Inputs per piece, `full` or less.
        full: Inputs per row.
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
        """Reads each row of the pieces once."""
        numbers, places = np.divmod(indices, self.per_row)
        unique, inverse = np.unique(numbers, return_inverse=True)
        starts = np.minimum(places * (self.length + 1), self.full - self.length)
        columns = starts[:, None] + np.arange(self.length)
        read = self.rows.read(unique)
        return {name: x[inverse[:, None], columns] for name, x in read.items()}

    def digest(self) -> str:
        """Checksum of the rows."""
        return self.rows.digest()
