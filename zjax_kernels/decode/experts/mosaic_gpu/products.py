"""Kernels of the products of experts, which read the matrices of chosen experts alone.

The first kernel makes the hidden channels of each chosen expert, multiplied by the
weight of the expert in each row. The second is then one product: it contracts the
hidden channels of all chosen experts. A split has the same channels of every expert, so
that all splits have as much to do, whatever the rows choose, and the sum of a row does
not depend on the experts of other rows, which add zeros.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from zjax_kernels.decode.experts.reference import Choice, ExpertOperands, output_bias
from zjax_kernels.decode.product.mosaic_gpu.kernel import End
from zjax_kernels.decode.product.mosaic_gpu.memory import (
    Memory,
    Place,
    Sizes,
    share_steps,
)
from zjax_kernels.decode.product.mosaic_gpu.ring import Ring
from zjax_kernels.decode.product.reference import Operands, Options
from zjax_kernels.decode.product.tuning import CHUNK, Tuning, choose
from zjax_kernels.sparse.mosaic_gpu.arithmetic import (
    COLUMNS,
    ROWS,
    Arithmetic,
    index,
    per_column,
    per_row,
)
from zjax_kernels.warpgroups import CLUSTER, launch, start_next, wait_for_last


def few_rows_experts(
    operands: ExpertOperands,
    choice: Choice,
    options: Options,
    *,
    tunings: tuple[Tuning | None, Tuning | None] = (None, None),
    interpret: Any = None,
) -> Array:
    """Runs `reference.few_rows_experts` on a Hopper GPU, for 16-bit rows.

    `tunings` are of the product before and behind the activation; None is chosen by
    shape. `interpret` holds the interpreter's parameters, None on a GPU. The
    interpreter has no clusters: it needs 1 split.
    """
    up, down = tunings
    # The interpreter runs one kernel after another.
    early = options.early and interpret is None
    options = dataclasses.replace(options, early=early)
    hidden = _make_hidden(operands, choice, options, up, interpret)
    return _sum_experts(hidden, operands, choice, early, down, interpret)


@dataclasses.dataclass(frozen=True)
class _OneExpert(Place):
    """Place of a program that multiplies by the matrix of one expert.

    Args:
        slot: Index of the expert in the list of chosen experts.
        expert: Index of the expert; -1 behind the last chosen one.
        num_steps_of_expert: Steps of a whole expert.
        num_columns: Columns of the result of an expert.
    """

    slot: Array
    expert: Array
    num_steps_of_expert: int
    num_columns: int

    @classmethod
    def find(cls, sizes: Sizes, choice: Any) -> "_OneExpert":
        """Returns the place of this program."""
        width, splits = sizes.tuning.width, sizes.tuning.splits
        split = index(lax.axis_index(CLUSTER) if splits > 1 else 0)
        tiles = index(sizes.columns // width)
        slot = lax.div(index(lax.axis_index("program")), tiles)
        start = lax.rem(index(lax.axis_index("program")), tiles) * width
        steps = sizes.depth // sizes.step
        first, end = share_steps(split, steps, splits)
        expert = choice.ids[slot]
        sized = steps, sizes.columns
        return cls(split, start, first, end - first, slot, expert, *sized)

    @property
    def output(self) -> Array:
        """First column of the result."""
        return self.slot * self.num_columns + self.start

    def step_of_weights(self, step: Array) -> Array:
        """Returns the place of a step among the rows of the matrices."""
        return self.expert * self.num_steps_of_expert + self.first + step


@dataclasses.dataclass(frozen=True)
class _AllExperts(Place):
    """Place of a program that contracts some channels of each chosen expert.

    Args:
        ids: Reference to the chosen experts.
        num_own_steps: Steps of an expert that the program has.
        num_steps_of_expert: Steps of a whole expert.
    """

    ids: Any
    num_own_steps: Array
    num_steps_of_expert: int

    @classmethod
    def find(cls, sizes: Sizes, choice: Any, steps: int) -> "_AllExperts":
        """Returns the place of this program, for experts of a number of steps."""
        width, splits = sizes.tuning.width, sizes.tuning.splits
        split = index(lax.axis_index(CLUSTER) if splits > 1 else 0)
        start = lax.axis_index("program") * width
        first, end = share_steps(split, steps, splits)
        # Each step is divided by this number: by a constant, that is a shift or two.
        own = end - first if steps % splits else index(steps // splits)
        ids = choice.ids
        num_steps = choice.count[0] * own
        return cls(split, start, first, num_steps, ids, own, steps)

    def step_of_rows(self, step: Array) -> Array:
        """Returns the place of a step among the hidden channels of all experts."""
        slot, own = lax.div(step, self.num_own_steps), lax.rem(step, self.num_own_steps)
        return slot * self.num_steps_of_expert + self.first + own

    def step_of_weights(self, step: Array) -> Array:
        """Returns the place of a step among the rows of the matrices."""
        slot, own = lax.div(step, self.num_own_steps), lax.rem(step, self.num_own_steps)
        return self.ids[slot] * self.num_steps_of_expert + self.first + own


@dataclasses.dataclass(frozen=True)
class _Weighted(End):
    """End of a program of one expert: biases, activation, and weights of the rows.

    Args:
        gates: float32[padded rows] weight of the expert in each row, in registers.
        biases: float32[width] biases of each part, or none.
    """

    gates: Array
    biases: list[Array]

    def activate(self, parts: list[Array]) -> Array:
        """Returns the weighted activation; 0 in rows that do not choose the expert."""
        shape = self.ring.sizes.sum_shape
        if self.biases:
            pairs = zip(parts, self.biases, strict=True)
            parts = [total + per_row(bias, shape) for total, bias in pairs]
        gates = per_column(self.gates, shape)
        # Whatever an expert makes of other rows: infinity times 0 would be NaN.
        return jnp.where(gates == 0, 0.0, gates * self.options.activate(*parts))


def _biases_of(ring: Ring, place: _OneExpert, bias: Any) -> list[Array]:
    """Loads the biases of the hidden channels of a program, for each part."""
    refs = [
        bias.at[place.expert, ring.channels(part)] for part in range(ring.sizes.parts)
    ]
    biases = [ring.arithmetic.load(ref, ROWS, optimized=False) for ref in refs]
    return [bias.astype(jnp.float32) for bias in biases]


def _add_biases(operands: ExpertOperands, choice: Choice, rows: int) -> Array | None:
    """Adds the weighted biases of the outputs to the residual."""
    residual, bias = operands.residual, operands.down_bias
    if bias is None:
        return residual
    total = output_bias(choice, bias, rows)
    total = total if residual is None else total + residual.astype(jnp.float32)
    return total.astype(operands.x.dtype)


def _make_hidden(
    operands: ExpertOperands,
    choice: Choice,
    options: Options,
    tuning: Tuning | None,
    interpret: Any,
) -> Array:
    """Returns the weighted hidden channels of the chosen experts: [N, most F].

    Channels behind the last chosen expert stay as they are in memory.
    """
    x, up, norm = operands.x, operands.up, operands.norm
    (rows, depth), parts = x.shape, options.num_parts
    columns = up.shape[2] // parts
    tuning = tuning or choose(
        rows,
        depth,
        columns,
        parts=parts,
        normal=norm is not None,
        dtype=up.dtype,
        matrices=choice.most,
    )
    sizes = Sizes(rows, depth, columns, parts, CHUNK, 0, tuning)
    product = Operands(x, up.reshape(-1, up.shape[2]), norm=norm)

    def body(inputs, outputs, scratch):
        product, choice, bias = inputs
        if options.early:
            # In this order: the next kernel reads the choice before this one ends.
            wait_for_last()
            start_next()
        place, (out_ref,) = _OneExpert.find(sizes, choice), outputs

        # All programs of a cluster have one expert: no program waits for another.
        @pl.when(place.expert >= 0)
        def _():
            memory, arithmetic = scratch.of(interpret), Arithmetic(interpret)
            ring = Ring(sizes, place, product, memory, arithmetic)
            ring.fill(early=False)
            gates = choice.gates.at[place.expert]
            gates = arithmetic.load(gates, COLUMNS, optimized=False)
            biases = [] if bias is None else _biases_of(ring, place, bias)
            _Weighted(ring, options, out_ref, gates, biases).run()

    (hidden,) = launch(
        body,
        (product, choice, operands.up_bias),
        [jax.ShapeDtypeStruct((rows, choice.most * columns), x.dtype)],
        Memory.allocate(sizes, product, interpret),
        num_programs=choice.most * columns // tuning.width,
        cluster_size=tuning.splits,
        interpret=interpret,
        approx_math=True,  # exp2 and tanh are single instructions
    )
    return hidden


def _sum_experts(
    hidden: Array,
    operands: ExpertOperands,
    choice: Choice,
    early: bool,
    tuning: Tuning | None,
    interpret: Any,
) -> Array:
    """Multiplies hidden channels by the output matrices of the experts: [N, M]."""
    (_, depth, columns), (rows, channels) = operands.down.shape, hidden.shape
    tuning = tuning or choose(rows, depth, columns, dtype=hidden.dtype)
    sizes = Sizes(rows, channels, columns, 1, CHUNK, 0, tuning)
    residual = _add_biases(operands, choice, rows)
    product = Operands(hidden, operands.down.reshape(-1, columns), residual=residual)

    def body(inputs, outputs, scratch):
        product, choice = inputs
        place, (out_ref,) = _AllExperts.find(sizes, choice, depth // CHUNK), outputs
        memory, arithmetic = scratch.of(interpret), Arithmetic(interpret)
        ring = Ring(sizes, place, product, memory, arithmetic)
        ring.fill(early=early)
        End(ring, Options(), out_ref).run()

    (out,) = launch(
        body,
        (product, choice),
        [jax.ShapeDtypeStruct((rows, columns), hidden.dtype)],
        Memory.allocate(sizes, product, interpret),
        num_programs=columns // tuning.width,
        cluster_size=tuning.splits,
        interpret=interpret,
    )
    return out
