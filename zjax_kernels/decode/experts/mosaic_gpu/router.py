"""Kernel of a router: logits of few rows, the choice, and the list of experts.

The programs of one cluster share the product of the rows with the router's matrix; the
first program has all logits, and chooses.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.decode.experts.reference import (
    LANES,
    LEAST,
    Choice,
    RouterOperands,
    RouterOptions,
)
from zjax_kernels.decode.experts.tuning import choose_router
from zjax_kernels.decode.product.mosaic_gpu.kernel import End
from zjax_kernels.decode.product.mosaic_gpu.memory import Memory, Place, Sizes
from zjax_kernels.decode.product.mosaic_gpu.ring import Ring
from zjax_kernels.decode.product.mosaic_gpu.sums import Sums
from zjax_kernels.decode.product.reference import Operands, Options
from zjax_kernels.decode.product.tuning import CHUNK, Tuning
from zjax_kernels.sparse.mosaic_gpu.arithmetic import (
    COLUMNS,
    ROWS,
    Arithmetic,
    index,
    per_column,
    per_row,
)
from zjax_kernels.warpgroups import launch

_LISTED = 32
"""Experts that are listed at a time: a matrix of all pairs would fill the registers."""


def choose_experts(
    operands: RouterOperands,
    options: RouterOptions,
    *,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Choice:
    """Runs `reference.choose_experts` on a Hopper GPU, for 16-bit rows.

    `tuning` and `interpret` are as for `few_rows_matmul`.
    """
    x, matrix, *_ = operands
    rows, width, depth = len(x), options.columns, len(matrix)
    normal = operands.norm is not None
    tuning = tuning or choose_router(rows, depth, width, normal=normal)
    # Each term repeats the rows, so that the depth is the depth of all terms.
    sizes = Sizes(rows, depth, width, 1, CHUNK, 0, tuning)
    steps_of_term = x.shape[1] // CHUNK
    most = options.most(rows)
    slots = -(-most // LANES) * LANES
    product, vectors = _operands_of(operands, sizes, options)

    def body(inputs, outputs, scratch):
        (product, vectors), (memory, *lists) = inputs, scratch
        arithmetic, place = Arithmetic(interpret), _Terms.find(sizes, steps_of_term)
        ring = Ring(sizes, place, product, memory.of(interpret), arithmetic)
        # The interpreter runs one kernel after another.
        ring.fill(early=options.early and interpret is None)
        given = vectors.load(arithmetic)
        settings = Options(eps=options.eps)
        gates, ids, count = outputs
        targets, lists = Choice(gates, ids, count, most), _Lists(*lists)
        _Choose(ring, settings, None, options, given, targets, lists).run()

    outputs = [
        jax.ShapeDtypeStruct((width, sizes.padded_rows), jnp.float32),
        jax.ShapeDtypeStruct((slots,), jnp.int32),
        jax.ShapeDtypeStruct((slots,), jnp.int32),
    ]
    numbers = plgpu.SMEM((width,), jnp.int32)
    memory = Memory.allocate(sizes, product, interpret)._replace(out=None)
    gates, ids, count = launch(
        body,
        (product, vectors),
        outputs,
        (memory, *_Lists(numbers, numbers)),
        num_programs=1,
        cluster_size=tuning.splits,
        interpret=interpret,
    )
    return Choice(gates, ids, count, most)


@dataclasses.dataclass(frozen=True)
class _Terms(Place):
    """Place of a program that contracts some channels of the terms of a matrix.

    Args:
        num_steps_of_term: Steps of a term, which are the steps of the rows.
    """

    num_steps_of_term: int

    @classmethod
    def find(cls, sizes: Sizes, num_steps_of_term: int) -> "_Terms":
        """Returns the place of this program."""
        place = Place.of(sizes)
        return cls(**vars(place), num_steps_of_term=num_steps_of_term)

    def step_of_rows(self, step: Array) -> Array:
        """Returns the place of a step among the contracted channels of the rows."""
        return lax.rem(self.first + step, index(self.num_steps_of_term))


class _Vectors(NamedTuple):
    """Numbers of experts or rows, in global memory or registers.

    Args:
        counts: float32[padded rows] that is not 0 for rows that choose.
        bias: float32[E'] added to the scores for the choice, or None.
        logit_bias: float32[E'] added to the logits, or None.
    """

    counts: Any
    bias: Any
    logit_bias: Any

    def load(self, arithmetic: Arithmetic) -> "_Vectors":
        """Loads the numbers into registers."""
        layouts = COLUMNS, ROWS, ROWS
        return _Vectors(
            *(
                None if ref is None else arithmetic.load(ref, layout, optimized=False)
                for ref, layout in zip(self, layouts, strict=True)
            )
        )


class _Lists(NamedTuple):
    """Numbers of experts in shared memory, which change the layout there.

    Args:
        used: int32[E'] that is 1 for a chosen expert, else 0.
        place: int32[E'] place of a chosen expert among the chosen ones; -1 for others.
    """

    used: Any
    place: Any


def _operands_of(
    operands: RouterOperands, sizes: Sizes, options: RouterOptions
) -> tuple[Operands, _Vectors]:
    """Returns the operands of the product, and padded vectors."""
    x, matrix, bias, logit_bias, counts, norm = operands
    counts = jnp.ones(sizes.rows, bool) if counts is None else counts

    def pad(x: Array | None, size: int) -> Array | None:
        return None if x is None else jnp.pad(x, (0, size - len(x))).astype(jnp.float32)

    experts = options.columns
    vectors = (
        pad(counts, sizes.padded_rows),
        pad(bias, experts),
        pad(logit_bias, experts),
    )
    return Operands(x, matrix, norm=norm), _Vectors(*vectors)


@dataclasses.dataclass(frozen=True)
class _Choose(End):
    """End of a router: the first program of the cluster chooses the experts.

    Args:
        router: Static choices of the router.
        vectors: Numbers of experts and rows, in registers.
        targets: References to the results in global memory.
        lists: Lists in shared memory.
    """

    router: RouterOptions
    vectors: _Vectors
    targets: Choice
    lists: _Lists

    def store(self, sums: Sums) -> None:
        """Stores the choice."""
        [logits] = self.normalised(sums)
        gates = self.gates(logits)
        self.targets.gates[...] = gates
        used = jnp.where(gates == 0, index(0), index(1)).max(axis=1)
        self.lists.used[...] = used
        plgpu.commit_smem()  # other threads must see the writes
        self.lists.place[...] = self.places(used)
        plgpu.commit_smem()
        self.targets.ids[...], self.targets.count[...] = self.listed()

    @property
    def arithmetic(self) -> Arithmetic:
        """Operations on registers."""
        return self.ring.arithmetic

    def gates(self, logits: Array) -> Array:
        """Returns the weight of each expert in each row: float32[E', padded rows]."""
        router, vectors, shape = self.router, self.vectors, logits.shape
        expert = self.arithmetic.iota(shape, 0)
        if vectors.logit_bias is not None:
            logits += per_row(vectors.logit_bias, shape)
        logits = self.hide(logits, expert)
        scores = self.scores(logits)
        ranked = scores
        if vectors.bias is not None:
            ranked = self.hide(scores + per_row(vectors.bias, shape), expert)

        def choose(_, carry):
            ranked, chosen = carry
            best = per_column(ranked.max(axis=0), shape)
            # Among equal scores the first expert, as `lax.top_k` does.
            ties = jnp.where(ranked == best, expert, index(shape[0]))
            is_first = expert == per_column(ties.min(axis=0), shape)
            chosen = jnp.where(is_first, scores, chosen)
            return jnp.where(is_first, -jnp.inf, ranked), chosen

        nothing = self.arithmetic.full(shape, 0.0, plgpu.Layout.WGMMA)
        _, gates = lax.fori_loop(0, router.top_k, choose, (ranked, nothing))
        if router.normalise and router.top_k > 1:
            gates /= per_column(jnp.maximum(gates.sum(axis=0), LEAST), shape)
        gates *= router.scale
        # Rows that fill up the tile have what was in memory, which may be NaN.
        return jnp.where(per_column(vectors.counts, shape) == 0, 0.0, gates)

    def hide(self, numbers: Array, expert: Array) -> Array:
        """Puts -inf in the rows of padding experts."""
        if self.router.num_experts == self.router.columns:
            return numbers
        return jnp.where(expert < self.router.num_experts, numbers, -jnp.inf)

    def scores(self, logits: Array) -> Array:
        """Returns the scores of logits, [E', padded rows]."""
        if self.router.scores == "sigmoid":
            return jax.nn.sigmoid(logits)
        scores = jnp.exp(logits - per_column(logits.max(axis=0), logits.shape))
        return scores / per_column(scores.sum(axis=0), logits.shape)

    def places(self, used: Array) -> Array:
        """Returns the place of each chosen expert among all chosen ones, else -1."""
        size = len(used)

        def add(nth, before):
            others = self.column(self.lists.used, nth, size)
            expert, other = self.pairs(size, nth)
            return before + jnp.where(other < expert, others, index(0)).sum(axis=1)

        before = self.for_some(add, self.zeros(size))
        return jnp.where(used == 0, index(-1), before)

    def listed(self) -> tuple[Array, Array]:
        """Returns the chosen experts, then -1, and the number of chosen experts."""
        size = self.targets.ids.shape[0]

        def add(nth, carry):
            ids, count = carry
            place = self.column(self.lists.place, nth, size)
            slot, expert = self.pairs(size, nth)
            # Numbers from 1 on, as 0 is the sum where no expert is.
            ids += jnp.where(place == slot, expert + 1, index(0)).sum(axis=1)
            return ids, count + jnp.where(place < 0, index(0), index(1)).sum(axis=1)

        ids, count = self.for_some(add, (self.zeros(size), self.zeros(size)))
        return ids - 1, count

    def for_some(self, add: Callable[[Array, Any], Any], start: Any) -> Any:
        """Loops over parts of the list of experts."""
        # Instructions that run once would be fetched from memory, one after another.
        return lax.fori_loop(0, self.router.columns // _LISTED, add, start)

    def zeros(self, size: int) -> Array:
        """Returns int32[size] of zeros, by row."""
        return self.layout_cast(jnp.zeros(size, jnp.int32), ROWS)

    def column(self, ref: Any, nth: Array, rows: int) -> Array:
        """Returns numbers of some experts, repeated for each row: [rows, experts]."""
        numbers = self.load(ref.at[pl.ds(nth * _LISTED, _LISTED)], COLUMNS)
        return per_column(numbers, (rows, _LISTED))

    def pairs(self, rows: int, nth: Array) -> tuple[Array, Array]:
        """Returns row and expert of each pair, of the experts of a part."""
        shape = rows, _LISTED
        row, column = (self.arithmetic.iota(shape, axis) for axis in (0, 1))
        return row, column + nth * _LISTED
