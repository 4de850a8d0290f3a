"""The state of replicas that take local steps, and fragments of the parameters.

`master` holds the anchor, the parameters that all replicas shared last: evaluation,
generation and export read `master` as in any other run. Arrays that differ between
replicas have a leading dim of replicas, sharded over `replica`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zjax.comm.codecs import make_codec
from zjax.errors import PlanError, Problem
from zjax.schedule.exchange import Exchanges
from zjax.sharding.mesh import REPLICA
from zjax.sharding.naming import layer_of
from zjax.sharding.placement import ArrayPlan
from zjax.sharding.plan import Plan
from zjax.sharding.roles import only_followers
from zjax.train.exchange import Exchange


class Piece(NamedTuple):
    """An array of a fragment.

    Args:
        leaf: Index of the array among all parameters.
        layers: Layers along the first dim; None for the whole array.
    """

    leaf: int
    layers: slice | None


@dataclasses.dataclass(frozen=True)
class Fragment:
    """A subset of the parameters that follow gradients.

    Args:
        pieces: Arrays, or layers of arrays, that the fragment holds.
    """

    pieces: tuple[Piece, ...]

    def take(self, leaves: Sequence[Any], *, dim: int = 0) -> list[jax.Array]:
        """Slices one value for each piece; layers are along dim `dim`."""
        return [leaves[p.leaf][_index(p, dim)] for p in self.pieces]

    def put(
        self, leaves: Sequence[Any], parts: Sequence[jax.Array], *, dim: int = 0
    ) -> list[Any]:
        """Replaces the slices of `take`."""
        new = list(leaves)
        for piece, part in zip(self.pieces, parts, strict=True):
            whole = piece.layers is None
            at = new[piece.leaf].at[_index(piece, dim)]
            new[piece.leaf] = part if whole else at.set(part)
        return new

    def rows(self, leaves: Sequence[ArrayPlan]) -> list[ArrayPlan]:
        """Returns plans of the pieces, with the stored shapes as logical shapes."""

        def row(piece: Piece) -> ArrayPlan:
            whole, shape = leaves[piece.leaf], leaves[piece.leaf].stored_shape
            if piece.layers is not None:
                shape = len(range(*piece.layers.indices(shape[0]))), *shape[1:]
            return dataclasses.replace(whole, shape=shape, used=whole.stored)

        return [row(piece) for piece in self.pieces]


def _index(piece: Piece, dim: int) -> tuple[slice, ...]:
    return (slice(None),) * dim + (piece.layers or slice(None),)


def make_fragments(master: Any, number: int) -> list[Fragment]:
    """Divides the parameters into `number` fragments of similar size.

    Layer `i` goes to fragment `i` modulo `number`, the strided pattern of Streaming
    DiLoCo (arXiv:2501.18512, section 2.1), all other arrays to the smallest fragment.
    Raises PlanError if there are more fragments than layers and other arrays.
    """
    pieces: list[list[Piece]] = [[] for _ in range(number)]
    sizes = [0] * number
    others: list[tuple[int, int]] = []
    for leaf, (keys, row) in enumerate(jax.tree_util.tree_leaves_with_path(master)):
        layer, size = layer_of(keys), math.prod(row.stored_shape)
        # Frozen parameters never differ, and a codec would move them; parameters that
        # follow totals are averaged at the end of a round, as an outer momentum would
        # move them again.
        if row.follows != "gradient":
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


class Outer(NamedTuple):
    """`TrainState.extra` of a run with local steps.

    Args:
        replicas: TrainState of every replica, arrays [N, ...]; without `step`.
        momentum: float32 momentum of the outer optimizer, in the form of `master`, with
            None for parameters that follow no gradient; an empty tuple if the momentum
            of the replicas serves.
        errors: Error feedback by fragment.
        arriving: Mean outer gradient by fragment, sent last, for a merge `delay` steps
            later; an empty tuple without delay.
    """

    replicas: Any
    momentum: Any
    errors: tuple[Any, ...]
    arriving: tuple[Any, ...]


def make_exchange(plan: Plan, codec: str | None, fragment: Fragment) -> Exchange:
    """Builds the exchange of a fragment, for the shards that a device stores."""
    assert codec is not None
    rows = fragment.rows(jax.tree.leaves(plan.master))
    # An exchange sends arrays in the placement of gradients: the fragment stands for
    # these.
    return Exchange(dataclasses.replace(plan, grads=rows), make_codec(codec))


def outer_rows(rows: Any, plan: Plan, exchanges: Exchanges) -> Any:
    """Returns the plans of a state with local steps, from plans of one replica."""
    by_fragment = [
        make_exchange(plan, exchanges.outer_codec, fragment)
        for fragment in make_fragments(plan.master, exchanges.num_fragments)
    ]
    followers = only_followers(plan.master, plan.master, "gradient")
    momentum = jax.tree.map(_float32, followers)
    means = tuple([_float32(r) for r in each.plan.grads] for each in by_fragment)
    extra = Outer(
        replicas=jax.tree.map(_by_replica, dataclasses.replace(rows, step=())),
        momentum=momentum if exchanges.outer_phase is None else (),
        errors=tuple(e.error_rows if e.feeds_back else () for e in by_fragment),
        arriving=means if exchanges.delay else (),
    )
    return dataclasses.replace(rows, opt_state=(), scaler=(), extra=extra)


def first_outer_state(state: Any, rows: Outer) -> Any:
    """Returns the first state, in which all replicas are equal, by plans of `extra`."""
    number = jax.tree.leaves(rows.replicas)[0].shape[0]
    zeros = jax.tree.map(
        lambda row: jnp.zeros(row.stored_shape, row.dtype),
        rows._replace(replicas=()),
    )
    replicas = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (number, *x.shape)),
        dataclasses.replace(state, step=()),
    )
    extra = zeros._replace(replicas=replicas)
    return dataclasses.replace(state, opt_state=(), scaler=(), extra=extra)


def _by_replica(row: ArrayPlan) -> ArrayPlan:
    """Adds the dim of replicas to the plan of an array."""
    mesh = row.stored.mesh
    number = mesh.shape[REPLICA]

    def place(sharding: NamedSharding) -> NamedSharding:
        return sharding.update(spec=P(REPLICA, *sharding.spec))

    return dataclasses.replace(
        row,
        path=f"extra/replicas/{row.path}",
        shape=(number, *row.shape),
        stored=place(row.stored),
        used=place(row.used),
        # Dim 0 counts replicas now, not layers.
        num_layers=0,
    )


def _float32(row: ArrayPlan) -> ArrayPlan:
    return dataclasses.replace(row, dtype=jnp.dtype("float32"))
