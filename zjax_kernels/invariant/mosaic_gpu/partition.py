"""Logarithm of the sum of exponentials of each row, by one warpgroup in one order.

A lane adds up the exponentials of fixed columns, from left to right; lanes are added at
the end. The row is read twice, the second time mostly from the L2 cache.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.device import NUM_SMS
from zjax_kernels.norm.reference import THREADS
from zjax_kernels.warpgroups import launch, load

_CHUNK = 32 * THREADS
"""Columns that are loaded at a time: 128 bytes a lane are on the way."""
_PROGRAMS_PER_SM = 4


def log_partition(scores: Array, *, interpret: Any = None) -> Array:
    """Returns float32[N] for scores float32[N, V], V a multiple of 128."""
    rows, columns = scores.shape
    programs = min(rows, NUM_SMS * _PROGRAMS_PER_SM)

    def body(inputs, outputs, _):
        (scores_ref,), (out_ref,) = inputs, outputs
        program = lax.axis_index("program")
        count = lax.div(rows - 1 - program, programs) + 1

        def compute(number, _):
            row = program + number * programs
            reduce = _Row(scores_ref.at[row], columns, interpret).reduce
            largest = reduce(-jnp.inf, lambda x: x, jnp.maximum, jnp.max)
            total = reduce(0.0, lambda x: jnp.exp(x - largest), jnp.add, jnp.sum)
            out_ref[row] = jnp.log(total) + largest

        lax.fori_loop(0, count, compute, None)

    out = jax.ShapeDtypeStruct((rows,), jnp.float32)
    (found,) = launch(
        body, (scores,), [out], num_programs=programs, interpret=interpret
    )
    return found


class _Row:
    """A row in global memory: whole chunks, and a last one that is shorter."""

    def __init__(self, ref: Any, columns: int, interpret: Any):
        self._ref, self._interpret = ref, interpret
        self._whole, self._left = divmod(columns, _CHUNK)

    def reduce(
        self,
        start: float,
        map_chunk: Callable[[Array], Array],
        combine: Callable[[Array, Array], Array],
        finish: Callable[[Array], Array],
    ) -> Array:
        """Combines chunks lane by lane, and the lanes at the end."""
        found = []
        if self._whole:
            zero = jnp.full(_CHUNK, start, jnp.float32)
            if self._interpret is None:
                # What a loop carries needs the layout of the chunks.
                zero = plgpu.layout_cast(zero, _layout(_CHUNK))

            def add(number, total):
                return combine(total, map_chunk(self._load(number * _CHUNK, _CHUNK)))

            found.append(finish(lax.fori_loop(0, self._whole, add, zero)))
        if self._left:
            last = map_chunk(self._load(self._whole * _CHUNK, self._left))
            found.append(finish(last))
        return found[0] if len(found) == 1 else combine(*found)

    def _load(self, first: Any, size: int) -> Array:
        """Loads columns from `first` on."""
        chunk = self._ref.at[pl.ds(first, size)]
        return load(chunk, _layout(size), interpret=self._interpret)


def _layout(columns: int) -> Any:
    """Returns the layout of columns in registers: strided over the warpgroup."""
    each = columns // THREADS
    # 4 numbers of 32 bits fill the widest load, 16 bytes.
    vector = next(size for size in (4, 2, 1) if each % size == 0)
    return plgpu.Layout.WG_STRIDED((columns,), vec_size=vector)
