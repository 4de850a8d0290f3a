"""Operations on registers of a warpgroup; scores scaled, capped and masked."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.sparse.chunks import HALF
from zjax_kernels.sparse.reference import Options
from zjax_kernels.sparse.schedule import Schedule
from zjax_kernels.warpgroups import load

ROWS = plgpu.Layout.WGMMA.reduce(1)
"""Layout of one number per row of a [HALF, n] matrix in registers."""
COLUMNS = plgpu.Layout.WGMMA.reduce(0)
"""Layout of one number per column of a [HALF, n] matrix in registers."""
ACC: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
_NEWER = hasattr(plgpu, "InterpretGPUParams")
"""Whether the interpreter simulates wgmma."""


def index(x: Any) -> jax.Array:
    """Returns an int32 scalar, whatever the default integer of JAX is."""
    return jnp.asarray(x, jnp.int32)


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """Operations on registers, on a GPU or under the interpreter.

    Args:
        interpret: Parameters of the interpreter; None on a GPU.
    """

    interpret: Any

    @property
    def simulated(self) -> bool:
        """Whether the interpreter runs the kernel."""
        return self.interpret is not None

    def layout_cast(self, x: jax.Array, layout: Any) -> jax.Array:
        """Distributes `x` over the lanes of a warpgroup."""
        return x if self.simulated else plgpu.layout_cast(x, layout)

    def full(self, shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
        """Returns float32[shape], filled with `value`."""
        return self.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def load(self, ref: Any, layout: Any, *, optimized: bool = True) -> jax.Array:
        """Reads a vector from shared memory; from global memory if not `optimized`."""
        return load(ref, layout, interpret=self.interpret, optimized=optimized)

    def product(
        self, x: Any, y: Any, meanwhile: Callable[[], Any] = lambda: None
    ) -> tuple[jax.Array, Any]:
        """Returns [m, d] times [n, d] transposed, float32[m, n], and `meanwhile()`.

        The matrices are in shared memory; `meanwhile` runs while the tensor cores do.
        """
        if self.simulated and not _NEWER:
            return _dot(x[...], y[...].T), meanwhile()

        def run(total):
            _start_product(total, x, y)
            # Before `total[...]`, which waits for the tensor cores.
            result = meanwhile()
            return total[...], result

        return pl.run_scoped(run, _accumulator(x, y))

    def product_of_chunks(self, chunks: Sequence[Any], y: Any) -> jax.Array:
        """Returns [m, d] times [n, d] transposed, float32[m, n].

        The matrices are in shared memory, the first in chunks of columns, [m, c] each.
        """
        width = chunks[0].shape[1]
        columns = [pl.ds(number * width, width) for number in range(len(chunks))]
        return self.product_of_pairs(
            [(x, y.at[:, each]) for x, each in zip(chunks, columns, strict=True)]
        )

    def product_of_pairs(self, pairs: Sequence[tuple[Any, Any]]) -> jax.Array:
        """Returns the sum of products of [m, c] and [n, c] transposed, float32[m, n].

        The matrices are in shared memory.
        """
        if self.simulated and not _NEWER:
            products = [_dot(x[...], y[...].T) for x, y in pairs]
            return functools.reduce(jnp.add, products)

        def run(total):
            for pair in pairs:
                _start_product(total, *pair)
            return total[...]

        return pl.run_scoped(run, _accumulator(*pairs[0]))

    def overlapped_products(
        self,
        pair: tuple[Any, Any],
        get_other: Callable[[], tuple[Any, Any]],
        use: Callable[[jax.Array], Any],
    ) -> tuple[Any, jax.Array]:
        """Computes two products; `use` runs on the first while the second is under way.

        `pair` is [m, d] and [n, d] in shared memory; `get_other` waits for the second
        pair. Returns the result of `use`, and the second product.
        """
        if self.simulated and not _NEWER:
            found = use(_dot(pair[0][...], pair[1][...].T))
            other = get_other()
            return found, _dot(other[0][...], other[1][...].T)

        def run(first, second):
            _start_product(first, *pair)
            _start_product(second, *get_other())
            # Waits for the first product alone.
            found = use(plgpu.wgmma_accumulator_load(first, wait_n=1))
            return found, second[...]

        return pl.run_scoped(run, _accumulator(*pair), _accumulator(*pair))

    def accumulate(
        self, *sums: tuple[jax.Array, jax.Array, Any]
    ) -> tuple[jax.Array, ...]:
        """Adds products to registers, all under way at once.

        Each of `sums` is float32[m, n] and [m, k] in registers, and [k, n] in shared
        memory.
        """
        if self.simulated:
            found = [total + _dot(x.astype(y.dtype), y[...]) for total, x, y in sums]
            plgpu.commit_smem()  # the GPU needs no fence after a read by tensor cores
            return tuple(found)

        def run(refs):
            for ref, (_, x, y) in zip(refs, sums, strict=True):
                plgpu.wgmma(ref, x.astype(y.dtype), y)

        run_with: Any = pl.run_state(run)
        return run_with(tuple(ACC.init(total) for total, _, _ in sums))

    def products(
        self, *sums: list[tuple[jax.Array, Any]], onto: Sequence[jax.Array] = ()
    ) -> tuple[jax.Array, ...]:
        """Returns sums of products, all under way at once, added to what is given.

        Each sum is of pairs of [m, k] in registers and [k, n] in shared memory; `onto`
        is float32[m, n] for each sum, in registers, or nothing.
        """
        if self.simulated:
            products = [[_dot(x, y[...]) for x, y in pairs] for pairs in sums]
            if onto:
                products = [[x, *each] for x, each in zip(onto, products, strict=True)]
            found = [functools.reduce(jnp.add, each) for each in products]
            plgpu.commit_smem()  # the GPU needs no fence after a read by tensor cores
            return tuple(found)

        def run(refs):
            for ref, pairs in zip(refs, sums, strict=True):
                for x, y in pairs:
                    plgpu.wgmma(ref, x, y)

        if onto:
            run_onto: Any = pl.run_state(run)
            return run_onto(tuple(map(ACC.init, onto)))

        def run_alone(*refs):
            run(refs)
            return tuple(ref[...] for ref in refs)

        shapes = [(pairs[0][0].shape[0], pairs[0][1].shape[1]) for pairs in sums]
        return pl.run_scoped(run_alone, *(ACC(shape, jnp.float32) for shape in shapes))

    def iota(self, shape: tuple[int, ...], axis: int) -> jax.Array:
        """Returns the indices along an axis, int32[shape]."""
        if self.simulated:
            return lax.broadcasted_iota(jnp.int32, shape, axis)
        layout = plgpu.Layout.WGMMA
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)

    def broadcast(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Repeats a scalar over a tile."""
        return self.layout_cast(jnp.broadcast_to(x, shape), plgpu.Layout.WGMMA)


def _accumulator(x, y):
    return ACC((x.shape[0], y.shape[0]), jnp.float32)


def _start_product(total, x, y):
    plgpu.wgmma(total, x, y.transpose((1, 0)))


def _dot(x, y):
    return jnp.dot(x.astype(jnp.float32), y.astype(jnp.float32))


def widen(x: jax.Array, dtype: Any) -> jax.Array:
    """Casts float8 in registers to 16 bits, without rounding.

    Hopper GPUs convert float8_e4m3fn to float16 alone.
    """
    half = x.astype(jnp.float16)
    return half if dtype == half.dtype else half.astype(jnp.float32).astype(dtype)


LOG2E = math.log2(math.e)
"""Factor of scores in base 2: the exponential instruction of GPUs is exp2."""


def per_row(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts one number per row, [m], to [m, n]."""
    return lax.broadcast_in_dim(x, shape, [0])


def per_column(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts one number per column, [n], to [m, n]."""
    return lax.broadcast_in_dim(x, shape, [1])


class Words(NamedTuple):
    """Bits of half a chunk, as in a `Schedule`."""

    live: Any
    diagonal: Any
    element: list[Any] | None
    """None without a token mask."""
    edges: tuple[Any, ...]
    """Empty without a window."""
    edge_offset: Any


def mask_cells(
    arithmetic: Arithmetic,
    x: jax.Array,
    schedule: Schedule,
    words: Words | None,
    fill: float,
) -> jax.Array:
    """Puts `fill` where a row of x, float32[HALF, chunk], does not see a column.

    `words` are bits of `read_words`, or None if all cells live. The logic is integer,
    since Boolean logic does not lower by warpgroup.
    """
    if words is None:
        return x
    cells_per_row = schedule.chunk // schedule.cell
    row, column = (arithmetic.iota(x.shape, axis) for axis in (0, 1))
    cell = _divide(column, schedule.cell)
    if schedule.cell < HALF:
        cell += _divide(row, schedule.cell) * index(cells_per_row)

    def bit(words, position):
        return lax.bitwise_and(lax.shift_right_logical(words, position), index(1))

    def cell_bit(word):
        return bit(arithmetic.broadcast(word, x.shape), cell)

    after = _modulo(column, schedule.cell) - _modulo(row, schedule.cell)
    after = -after if schedule.transposed else after
    if schedule.causal:
        # A product above 0 is `and` without Booleans.
        x = jnp.where(cell_bit(words.diagonal) * jnp.maximum(after, 0) > 0, fill, x)
    if words.edges:
        first, second = map(cell_bit, words.edges)
        # Tokens by which a key is out of reach, in cells that the window's end crosses.
        beyond = second * index(schedule.cell) - after
        beyond -= arithmetic.broadcast(words.edge_offset - index(1), x.shape)
        # One select for both cells: two would spill registers.
        x = jnp.where((first + second) * jnp.maximum(beyond, 0) > 0, fill, x)
    if words.element is not None:
        # A word has 32 columns: the column decides on the word.
        word, *others = (per_row(word, x.shape) for word in words.element)
        for number, other in enumerate(others, start=1):
            word = jnp.where(column < number * 32, word, other)
        x = jnp.where(bit(word, _modulo(column, 32)) != 0, x, fill)
    return jnp.where(cell_bit(words.live) != 0, x, fill)


def _divide(x, power_of_2):
    # GPUs have no instruction for integer division.
    return lax.shift_right_logical(x, index(power_of_2.bit_length() - 1))


def _modulo(x, power_of_2):
    return lax.bitwise_and(x, index(power_of_2 - 1))


def read_words(
    arithmetic: Arithmetic, schedule: Schedule, chunk: jax.Array, half: jax.Array
) -> Words:
    """Reads the bits of half a chunk from global memory."""
    element, edges, offset = None, (), None
    masks: Any = schedule.masks
    if schedule.elements is not None:
        number = schedule.elements[chunk, half]
        element = [
            arithmetic.load(masks.at[number, word], ROWS, optimized=False)
            for word in range(masks.shape[1])
        ]
    if schedule.edges is not None and schedule.edge_offset is not None:
        edges = tuple(schedule.edges[chunk, half, number] for number in range(2))
        offset = schedule.edge_offset[0]
    live, diagonal = schedule.live[chunk, half], schedule.diagonal[chunk, half]
    return Words(live, diagonal, element, edges, offset)


def scale_and_cap(
    scores: jax.Array, options: Options
) -> tuple[jax.Array, jax.Array | None]:
    """Returns scores in base 2, and the derivative of the cap or None."""
    if not options.soft_cap:
        return scores * (options.scale * LOG2E), None
    capped = jnp.tanh(scores * (options.scale / options.soft_cap))
    return capped * (options.soft_cap * LOG2E), 1.0 - capped * capped


def base_2(lse: jax.Array) -> jax.Array:
    """Returns log-sum-exps in base 2; inf without keys, so that weights are 0."""
    return jnp.where(jnp.isneginf(lse), jnp.inf, lse * LOG2E)


def mask_segments(
    x: jax.Array, row_segments: jax.Array, column_segments: jax.Array, fill: float
) -> jax.Array:
    """Puts `fill` where row and column are of different documents."""
    difference = per_row(row_segments, x.shape) - per_column(column_segments, x.shape)
    return jnp.where(difference == 0, x, fill)


def softmax_step(
    scores: jax.Array, row_max: jax.Array, factor: float, *, masked: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns weights relative to the new maximum, the maximum, and a correction.

    `factor` makes scores of base 2; `masked` says whether a row may see no key.
    """
    new_max = jnp.maximum(row_max, scores.max(axis=1) * factor)
    # -inf minus -inf is NaN; without masks every row has a maximum.
    level = jnp.where(new_max == -jnp.inf, 0.0, new_max) if masked else new_max
    p = jnp.exp2(scores * factor - per_row(level, scores.shape))
    return p, new_max, jnp.exp2(row_max - level)


def normalize(
    out: jax.Array, row_max: jax.Array, row_sum: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns outputs and log-sum-exps; 0 and -inf for queries that see nothing.

    `row_max` is in base 2.
    """
    divisor = jnp.where(row_sum == 0.0, 1.0, row_sum)
    lse = jnp.where(row_sum == 0.0, -jnp.inf, row_max * (1 / LOG2E) + jnp.log(divisor))
    return out * per_row(1.0 / divisor, out.shape), lse
