"""Kernels of filters on Hopper GPUs: a program, one warpgroup, for each row.

A program sweeps over its row in vectors of registers. Nothing leaves the kernel between
sweeps, so that a CUDA graph can hold the whole filter.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.decode.filters.reference import NUM_LIMBS, bits_of_limb
from zjax_kernels.sparse.mosaic_gpu.arithmetic import Arithmetic, index
from zjax_kernels.warpgroups import launch

VECTOR = 512
"""Numbers of a vector: 4 for each lane, which are the widest load."""
MAX_LOADS = 8
"""Vectors that are loaded at once, to wait for memory once."""
BITS = 2
"""Bits of the threshold that a sweep decides."""
_SMALLEST, _LARGEST = -(2**31), 2**31 - 1
_LOWEST, _HIGHEST = -0x7F800001, 0x7F800000
"""Codes of -inf and inf, by `_code_of`."""


def top_k_threshold(logits: Array, wanted: Array, *, interpret: Any = None) -> Array:
    """Runs `reference.top_k_threshold` on a Hopper GPU.

    `interpret` holds the interpreter's parameters, None on a GPU.
    """

    def count(_):
        return [index(1)]

    def has_enough(sums, wanted):
        return sums[0] >= wanted

    rows = _Rows.of(logits.shape[1], interpret)
    return _largest_threshold(rows, [logits], wanted, count, 1, has_enough)


def top_p_threshold(
    logits: Array, weights: Array, wanted: Array, *, interpret: Any = None
) -> Array:
    """Runs `reference.top_p_threshold` on a Hopper GPU, with equal sums."""
    num_bits = bits_of_limb(logits.shape[1])

    def cut(rest):
        limbs = []
        for _ in range(NUM_LIMBS):
            rest = rest * 2.0**num_bits
            limbs.append(rest.astype(jnp.int32))
            rest = rest - limbs[-1].astype(jnp.float32)
        return limbs

    def has_enough(sums, wanted):
        total = jnp.float32(0)
        for number, each in enumerate(sums):
            total += each.astype(jnp.float32) * 2.0 ** (-num_bits * (number + 1))
        return total >= wanted

    rows = _Rows.of(logits.shape[1], interpret)
    arrays = [logits, weights]
    return _largest_threshold(rows, arrays, wanted, cut, NUM_LIMBS, has_enough)


def find_best(
    logits: Array, number: int, counts: Array, *, interpret: Any = None
) -> tuple[Array, Array]:
    """Runs `reference.find_best` on a Hopper GPU, for the first `counts` of each row.

    The others are undefined.
    """
    num_rows, vocab_size = logits.shape
    rows = _Rows.of(vocab_size, interpret)

    def body(inputs, outputs, _):
        (logits_ref, counts_ref), (values_ref, ids_ref) = inputs, outputs
        row = lax.axis_index("program")

        def take(nth, last):
            code, token = _find_next(rows, logits_ref, row, last)
            values_ref[row * number + nth] = _float_of(code)
            ids_ref[row * number + nth] = token
            return code, token

        lax.fori_loop(0, counts_ref[row], take, (index(_LARGEST), index(-1)))

    outputs = [
        jax.ShapeDtypeStruct((num_rows * number,), dtype)
        for dtype in (jnp.float32, jnp.int32)
    ]
    inputs = rows.lay(logits, -jnp.inf), counts
    found = launch(body, inputs, outputs, num_programs=num_rows, interpret=interpret)
    values, ids = (x.reshape(num_rows, number) for x in found)
    return values, ids


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows in global memory, as vectors, and sweeps over a row.

    Args:
        num_steps: Loads of several vectors that a sweep waits for.
        num_loads: Vectors of a step.
        arithmetic: Operations on registers.
    """

    num_steps: int
    num_loads: int
    arithmetic: Arithmetic

    @classmethod
    def of(cls, vocab_size: int, interpret: Any) -> "_Rows":
        """Returns the layout of rows of a vocabulary."""
        num_vectors = -(-vocab_size // VECTOR)
        num_loads = min(num_vectors, MAX_LOADS)
        return cls(-(-num_vectors // num_loads), num_loads, Arithmetic(interpret))

    def lay(self, x: Array, fill: float) -> Array:
        """Pads rows to whole steps, and lays them as vectors."""
        width = self.num_steps * self.num_loads * VECTOR
        padding = (0, 0), (0, width - x.shape[1])
        return jnp.pad(x, padding, constant_values=fill).reshape(-1, VECTOR)

    def full(self, value: int) -> Array:
        """Returns int32[VECTOR], filled with a number."""
        full = jnp.full(VECTOR, value, jnp.int32)
        return self.arithmetic.layout_cast(full, _layout())

    def iota(self) -> Array:
        """Returns the places in a vector, int32[VECTOR]."""
        if self.arithmetic.simulated:
            return lax.broadcasted_iota(jnp.int32, (VECTOR,), 0)
        return plgpu.broadcasted_iota(jnp.int32, (VECTOR,), 0, layout=_layout())

    def sweep(
        self,
        refs: Sequence[Any],
        row: Array,
        add: Callable[[Array, Sequence[Array], Any], Any],
        start: Any,
    ) -> Any:
        """Carries `add(first id, vectors of refs, carry)` over the vectors of a row."""

        def step(number, carry):
            first = number * self.num_loads
            place = row * (self.num_steps * self.num_loads) + first
            # Before anything is added: each load would wait for memory otherwise.
            loaded = [
                [self.load(ref.at[place + nth]) for ref in refs]
                for nth in range(self.num_loads)
            ]
            for nth, vectors in enumerate(loaded):
                carry = add((first + nth) * VECTOR, vectors, carry)
            return carry

        return lax.fori_loop(0, self.num_steps, step, start)

    def load(self, ref: Any) -> Array:
        """Loads a vector from global memory."""
        return self.arithmetic.load(ref, _layout())


def _layout() -> Any:
    """Returns the layout of a vector in registers."""
    return plgpu.Layout.WG_STRIDED((VECTOR,), vec_size=4)


def _largest_threshold(
    rows: _Rows,
    arrays: Sequence[Array],
    wanted: Array,
    terms: Callable[[Array], list[Array]],
    num_terms: int,
    has_enough: Callable[[list[Array], Array], Array],
) -> Array:
    """Runs `reference._largest_threshold` for sums over the logits from a threshold on.

    `terms` makes `num_terms` integers of the last of `arrays`, of which the first has
    the logits; `has_enough` judges their sums.
    """
    num_rows = len(wanted)
    thresholds = 2**BITS - 1

    def body(inputs, outputs, _):
        (refs, wanted_ref), (out_ref,) = inputs, outputs
        row = lax.axis_index("program")
        wanted = wanted_ref[row]

        def decide(nth, low):
            unit = lax.shift_left(index(1), index(32 - BITS) - nth * BITS)
            bounds = [
                _float_of(_clip(low + unit * number))
                for number in range(1, thresholds + 1)
            ]

            def add(_, vectors, sums):
                logits, found = vectors[0], terms(vectors[-1])
                return [
                    total + jnp.where(logits >= bound, term, index(0))
                    for bound, totals in zip(
                        bounds, _split(sums, num_terms), strict=True
                    )
                    for total, term in zip(totals, found, strict=True)
                ]

            start = [rows.full(0)] * (thresholds * num_terms)
            sums = [jnp.sum(x) for x in rows.sweep(refs, row, add, start)]
            # The condition holds up to a threshold: the number that hold is the digit.
            for each in _split(sums, num_terms):
                low += jnp.where(has_enough(each, wanted), unit, index(0))
            return low

        code = lax.fori_loop(0, 32 // BITS, decide, index(_SMALLEST))
        out_ref[row] = _float_of(_clip(code))

    fills = (-jnp.inf, 0.0)
    laid = [rows.lay(x, fill) for x, fill in zip(arrays, fills, strict=False)]
    (found,) = launch(
        body,
        (laid, wanted),
        [jax.ShapeDtypeStruct((num_rows,), jnp.float32)],
        num_programs=num_rows,
        interpret=rows.arithmetic.interpret,
    )
    return found


def _split(values: Sequence[Array], size: int) -> list[list[Array]]:
    """Splits values into lists of a size."""
    return [list(values[n : n + size]) for n in range(0, len(values), size)]


def _find_next(
    rows: _Rows, ref: Any, row: Array, last: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Finds the largest code behind the last code and id, and its lowest id."""
    last_code, last_id = last
    places = rows.iota()

    def add(first, vectors, best):
        best_code, best_id = best
        code, token = _code_of(vectors[0]), places + first
        tied = jnp.where(token > last_id, code, index(_SMALLEST))
        behind = jnp.where(code == last_code, tied, index(_SMALLEST))
        code = jnp.where(code < last_code, code, behind)
        # Among equal codes the id before stays, which is lower.
        best_id = jnp.where(code > best_code, token, best_id)
        return jnp.maximum(code, best_code), best_id

    start = rows.full(_SMALLEST), rows.full(0)
    codes, ids = rows.sweep([ref], row, add, start)
    code = jnp.max(codes)
    # A maximum of negative ids, as integers have a fast one within a warp.
    return code, -jnp.max(jnp.where(codes == code, -ids, index(_SMALLEST)))


def _code_of(x: Array) -> Array:
    """Returns int32 codes of float32, which have the order of the numbers."""
    return _flip(lax.bitcast_convert_type(x, jnp.int32))


def _float_of(code: Array) -> Array:
    """Returns the float32 of codes."""
    return lax.bitcast_convert_type(_flip(code), jnp.float32)


def _flip(bits: Array) -> Array:
    """Turns the order of negative numbers around."""
    # A larger magnitude is a smaller number where the sign is negative.
    return jnp.where(bits < 0, bits ^ index(_LARGEST), bits)


def _clip(code: Array) -> Array:
    """Moves codes that are no number to -inf, or to the number below inf."""
    return jnp.minimum(jnp.maximum(code, index(_LOWEST)), index(_HIGHEST - 1))
