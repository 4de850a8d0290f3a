"""Fragments of the parameters that replicas exchange at different steps.

Fragments hold the parameters that follow gradients. Frozen ones never differ between
replicas, and a codec would move them; those that follow totals are averaged at the end
of a round, as an outer momentum would move them again.

Layer `i` of a stack belongs to fragment `i` modulo their number, the strided pattern of
Streaming DiLoCo (arXiv:2501.18512, section 2.1). Other arrays go to the fragment that
is the smallest so far, the largest arrays first.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from zjax.errors import PlanError, Problem
from zjax.sharding.paths import layer_of
from zjax.sharding.placement import ArrayPlan


class Piece(NamedTuple):
    """An array of a fragment.

    Args:
        leaf: Number of the array among all parameters.
        layers: Layers along its first dim; None for the whole array.
    """

    leaf: int
    layers: slice | None


@dataclasses.dataclass(frozen=True)
class Fragment:
    """Some of the parameters that follow gradients.

    Args:
        pieces: What it holds of which array.
    """

    pieces: tuple[Piece, ...]

    def take(self, leaves: Sequence[Any], *, dim: int = 0) -> list[jax.Array]:
        """Slices one value for each parameter; `dim` is that of the layers."""
        return [leaves[p.leaf][_index(p, dim)] for p in self.pieces]

    def put(
        self, leaves: Sequence[Any], parts: Sequence[jax.Array], *, dim: int = 0
    ) -> list[Any]:
        """Replaces what `take` slices."""
        new = list(leaves)
        for piece, part in zip(self.pieces, parts, strict=True):
            whole = piece.layers is None
            at = new[piece.leaf].at[_index(piece, dim)]
            new[piece.leaf] = part if whole else at.set(part)
        return new

    def rows(self, leaves: Sequence[ArrayPlan]) -> list[ArrayPlan]:
        """Plans of its arrays, whose logical shapes are the stored ones."""

        def row(piece: Piece) -> ArrayPlan:
            whole, shape = leaves[piece.leaf], leaves[piece.leaf].stored_shape
            if piece.layers is not None:
                shape = len(range(*piece.layers.indices(shape[0]))), *shape[1:]
            return dataclasses.replace(whole, shape=shape, used=whole.stored)

        return [row(piece) for piece in self.pieces]


def _index(piece: Piece, dim: int) -> tuple[slice, ...]:
    return (slice(None),) * dim + (piece.layers or slice(None),)


def make_fragments(master: Any, number: int) -> list[Fragment]:
    """Divides the parameters.

    Args:
        master: Plans of the master weights.
        number: Fragments, 1 or more.

    Raises:
        PlanError: There are more fragments than layers and other arrays.
    """
    pieces: list[list[Piece]] = [[] for _ in range(number)]
    sizes = [0] * number
    others: list[tuple[int, int]] = []
    for leaf, (keys, row) in enumerate(jax.tree_util.tree_leaves_with_path(master)):
        layer, size = layer_of(keys), math.prod(row.stored_shape)
        if row.follows != "gradient":
            continue
        if layer is not None:
            pieces[layer % number].append(Piece(leaf, None))
            sizes[layer % number] += size
        elif number > 1 and row.num_layers >= number and not _splits_layers(row):
            for i in range(number):
                pieces[i].append(Piece(leaf, slice(i, None, number)))
                sizes[i] += size * len(range(i, row.num_layers, number))
        else:
            others.append((size, leaf))
    for size, leaf in sorted(others, key=lambda other: (-other[0], other[1])):
        smallest = sizes.index(min(sizes))
        pieces[smallest].append(Piece(leaf, None))
        sizes[smallest] += size
    if not all(pieces):
        most = sum(map(bool, pieces))
        problem = "has fragments without any layer or array"
        remedy = f"use at most {most}"
        raise PlanError(Problem("communication.num_fragments", number, problem, remedy))
    return [Fragment(tuple(each)) for each in pieces]


def _splits_layers(row: ArrayPlan) -> bool:
    return bool(row.spec) and row.spec[0] is not None
