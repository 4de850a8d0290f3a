"""Which parameters replicas exchange: all at a time, or fragments of the parameters."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from zjax.errors import PlanError, Problem
from zjax.sharding.naming import layer_of
from zjax.sharding.placement import ArrayPlan, Follows

EXCHANGED: Follows = "gradient"
"""Parameters that messages and fragments hold. Codecs have no 0: they would move frozen
parameters, which never differ, and these would influence the scales of all others."""
AVERAGED: Follows = "totals"
"""Parameters that replicas average at the end of a round. Totals move them in each
replica, and an outer momentum would move them again."""


class Piece(NamedTuple):
    """An array of a fragment.

    Args:
        layers: Layers along the first dim; None for the whole array.
    """

    leaf: int
    layers: slice | None


@dataclasses.dataclass(frozen=True)
class Fragment:
    """A subset of the `EXCHANGED` parameters."""

    pieces: tuple[Piece, ...]

    def take(self, leaves: Sequence[Any], *, dim: int = 0) -> list[Any]:
        """Returns one value for each piece; layers are along dim `dim`."""
        return [
            leaves[p.leaf] if p.layers is None else leaves[p.leaf][_index(p, dim)]
            for p in self.pieces
        ]

    def put(
        self, leaves: Sequence[Any], parts: Sequence[jax.Array], *, dim: int = 0
    ) -> list[Any]:
        """Replaces the slices of `take`."""
        new = list(leaves)
        for piece, part in zip(self.pieces, parts, strict=True):
            old = new[piece.leaf]
            whole = piece.layers is None
            new[piece.leaf] = part if whole else old.at[_index(piece, dim)].set(part)
        return new

    def rows(self, leaves: Sequence[ArrayPlan]) -> list[ArrayPlan]:
        """Returns plans of the pieces, with the stored shapes as logical shapes."""

        def row(piece: Piece) -> ArrayPlan:
            whole, shape = leaves[piece.leaf], leaves[piece.leaf].stored_shape
            if piece.layers is not None:
                shape = len(range(*piece.layers.indices(shape[0]))), *shape[1:]
            return dataclasses.replace(whole, shape=shape, used=whole.stored)

        return [row(piece) for piece in self.pieces]


def _index(piece: Piece, dim: int) -> tuple[slice | None, ...]:
    return (slice(None),) * dim + (piece.layers,)


def whole_fragment(rows: Sequence[ArrayPlan]) -> Fragment:
    """Returns the fragment of all `EXCHANGED` arrays, by plans of all arrays."""
    leaves = (i for i, row in enumerate(rows) if row.follows == EXCHANGED)
    return Fragment(tuple(Piece(leaf, None) for leaf in leaves))


def make_fragments(master: Any, number: int) -> list[Fragment]:
    """Divides the `EXCHANGED` parameters into `number` fragments of similar size.

    Layer `i` goes to fragment `i` modulo `number`, the strided pattern of Streaming
    DiLoCo (arXiv:2501.18512, section 2.1), all other arrays to the smallest fragment.
    Raises PlanError if there are more fragments than layers and other arrays.
    """
    pieces: list[list[Piece]] = [[] for _ in range(number)]
    sizes = [0] * number
    others: list[tuple[int, int]] = []
    for leaf, (keys, row) in enumerate(jax.tree_util.tree_leaves_with_path(master)):
        layer, size = layer_of(keys), math.prod(row.stored_shape)
        if row.follows != EXCHANGED:
            continue
        if layer is not None:
            pieces[layer % number].append(Piece(leaf, None))
            sizes[layer % number] += size
        # A sharded layer dim cannot be sliced by layer without moving shards.
        elif number > 1 and row.num_layers >= number and not _splits_layers(row):
            for i in range(number):
                pieces[i].append(Piece(leaf, slice(i, None, number)))
                sizes[i] += size * len(range(i, row.num_layers, number))
        else:
            others.append((size, leaf))
    # Largest first balances sizes; the index breaks ties equally in all processes.
    for size, leaf in sorted(others, key=lambda other: (-other[0], other[1])):
        smallest = sizes.index(min(sizes))
        pieces[smallest].append(Piece(leaf, None))
        sizes[smallest] += size
    if not all(pieces):
        most = sum(map(bool, pieces))
        problem = "has fragments without any layer or array"
        remedy = f"use at most {most}"
        raise PlanError(
            Problem("communication.local_steps.num_fragments", number, problem, remedy)
        )
    return [Fragment(tuple(each)) for each in pieces]


def _splits_layers(row: ArrayPlan) -> bool:
    """Whether the dim of layers is sharded."""
    return bool(row.spec) and row.spec[0] is not None
