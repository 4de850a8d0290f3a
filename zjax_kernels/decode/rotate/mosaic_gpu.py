"""Kernel that rotates decoded tokens and writes them to pages, on Hopper GPUs.

A program is one warpgroup, and each warp has one head of a token. Heads are written one
by one: to the queries, or to the pages of keys or values.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels import warpgroups
from zjax_kernels.decode.rotate.reference import Operands, Options
from zjax_kernels.sparse.mosaic_gpu.arithmetic import (
    Arithmetic,
    index,
    per_column,
    per_row,
)

HEADS = 4
"""Heads of a program: a warp for each."""
_COPY_BYTES = 128
"""Bytes to a multiple of which the source of a copy is aligned."""
LANES = 32
"""Lanes of a warp, over which channels are distributed."""


def rotate_and_write(
    operands: Operands,
    keys: Array,
    values: Array,
    options: Options,
    *,
    interpret: Any = None,
) -> tuple[Array, Array, Array]:
    """Runs `reference.rotate_and_write` on a Hopper GPU, for products of 16 bits.

    Pages have the dtype of the product, or float8. `interpret` holds the interpreter's
    parameters, None on a GPU.
    """
    num_tokens, num_heads, size = operands.product.shape
    tiles = -(-num_heads // HEADS)
    # Kernels write to references in place.
    pools = [jax.new_ref(pool, memory_space=plgpu.GMEM) for pool in (keys, values)]

    def body(inputs, outputs, scratch):
        refs, *pool_refs = inputs
        (q_ref,) = outputs
        # The interpreter runs one kernel after another.
        if options.early and interpret is None:
            warpgroups.start_next()
            warpgroups.wait_for_last()
        program = lax.axis_index("program")
        token, tile = lax.div(program, index(tiles)), lax.rem(program, index(tiles))
        own = tile * HEADS
        # The last program reads heads of the program before, to have enough.
        first = jnp.minimum(own, index(num_heads - HEADS))
        arithmetic = Arithmetic(interpret)
        heads = _Heads(Operands(*refs), options, token, first, own, arithmetic)
        _, num_keys, page_size, _ = pool_refs[0].shape
        # All loads at once: behind a fence they would wait for one another.
        raw, slot = heads.read(), heads.find_slot(page_size)
        heads.rotate(raw, num_keys, scratch)
        heads.write(scratch, slot, q_ref, *pool_refs)

    shape = num_tokens, 1, options.num_queries, size
    (q,) = warpgroups.launch(
        body,
        (operands, *pools),
        [jax.ShapeDtypeStruct(shape, operands.product.dtype)],
        _Finished.types(size, operands.product.dtype, keys.dtype),
        num_programs=num_tokens * tiles,
        interpret=interpret,
        approx_math=True,  # rsqrt is a single instruction
        reduction_scratch_bytes=0,  # heads are reduced within a warp
    )
    return q, jax.freeze(pools[0]), jax.freeze(pools[1])


class _Finished(NamedTuple):
    """Finished heads in shared memory.

    Args:
        heads: [HEADS, D] heads in the dtype of the product.
        narrow: [HEADS, D or more] heads in the dtype of the pages; None where it is the
            dtype of the product.
    """

    heads: Any
    narrow: Any

    @classmethod
    def types(cls, size: int, dtype: Any, page_dtype: Any) -> "_Finished":
        """Returns the types of shared memory."""
        narrow = None
        if page_dtype != dtype:
            # Copies of heads begin at multiples of 128 bytes.
            narrow = plgpu.SMEM((HEADS, max(size, _COPY_BYTES)), page_dtype)
        return cls(plgpu.SMEM((HEADS, size), dtype), narrow)

    def store(self, channels: Any, numbers: Array) -> None:
        """Stores channels of all heads, float32[HEADS, n]."""
        rounded = numbers.astype(self.heads.dtype)
        self.heads.at[:, channels][...] = rounded
        if self.narrow is not None:
            # Pages hold what has been rounded to the dtype of the product.
            largest = float(jnp.finfo(self.narrow.dtype).max)
            wide = jnp.clip(rounded.astype(jnp.float32), -largest, largest)
            self.narrow.at[:, channels][...] = wide.astype(self.narrow.dtype)

    def for_pages(self, nth: int) -> Any:
        """Returns a head as pages store it."""
        if self.narrow is None:
            return self.heads.at[nth]
        return self.narrow.at[nth, pl.ds(0, self.heads.shape[1])]


class _Span(NamedTuple):
    """Channels of a head.

    Args:
        first: First channel.
        width: Number of channels.
    """

    first: int
    width: int

    @property
    def channels(self) -> Any:
        """The channels as an index."""
        return pl.ds(self.first, self.width)


class _Slot(NamedTuple):
    """Place of a token in the pools.

    Args:
        page: Page of the row.
        place: Place in the page.
        is_written: Whether the token is written.
    """

    page: Array
    place: Array
    is_written: Array


@dataclasses.dataclass(frozen=True)
class _Heads:
    """Some heads of a token, side by side in the product.

    Args:
        operands: `Operands` of references to global memory.
        options: Static choices.
        token: Index of the token.
        first: First of the heads among queries, keys and values.
        own: First head that the program writes.
        arithmetic: Operations on registers.
    """

    operands: Operands
    options: Options
    token: Array
    first: Array
    own: Array
    arithmetic: Arithmetic

    @functools.cached_property
    def spans(self) -> list[_Span]:
        """Channels that rotate, in halves, and the others behind them."""
        size = self.operands.product.shape[-1]
        rotation = self.operands.rotation
        half = 0 if rotation is None else rotation[0].shape[-1]
        spans = _Span(0, half), _Span(half, half), _Span(2 * half, size - 2 * half)
        return [span for span in spans if span.width]

    @property
    def layout(self) -> Any:
        """Layout of heads in registers: a warp for each, channels over the lanes."""
        per_lane = math.gcd(*(span.width for span in self.spans)) // LANES
        vector = math.gcd(per_lane, 4)
        tiling = plgpu.Tiling(((HEADS, LANES * vector), (vector,)))
        return plgpu.Layout.TILED(
            tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
        )

    def load(self, ref: Any, layout: Any) -> Array:
        """Loads numbers from global memory, as float32."""
        return self.arithmetic.load(ref, layout, optimized=False).astype(jnp.float32)

    def read(self) -> list[Array]:
        """Reads the channels of the heads, with biases."""
        heads, layout = pl.ds(self.first, HEADS), self.layout
        product, bias = self.operands.product, self.operands.bias
        places = [(heads, span.channels) for span in self.spans]
        raw = [self.load(product.at[self.token, *place], layout) for place in places]
        if bias is None:
            return raw
        biases = [self.load(bias.at[place], layout) for place in places]
        return [x + y for x, y in zip(raw, biases, strict=True)]

    def find_slot(self, page_size: int) -> _Slot:
        """Returns the place of the token in the pages of the row."""
        pages, position = self.operands.pages, self.operands.starts[self.token]
        last = index(pages.shape[1] - 1)
        page = pages[self.token, jnp.minimum(lax.div(position, index(page_size)), last)]
        is_written = self.operands.counts[self.token] > 0
        return _Slot(page, lax.rem(position, index(page_size)), is_written)

    def rotate(self, raw: list[Array], num_keys: int, target: _Finished) -> None:
        """Writes the finished heads to shared memory."""
        first_value = self.options.num_queries + num_keys
        found = self.turn(self.normalize(raw))
        for x, y, span in zip(raw, found, self.spans, strict=True):
            y *= self.select(self.options.num_queries, self.options.query_scale, 1.0, y)
            y = self.select(first_value, y, x, y)
            target.store(span.channels, y)
        plgpu.commit_smem()  # copies must see the writes of registers

    def select(self, end: int, before: Any, behind: Any, like: Array) -> Any:
        """Chooses numbers for heads before `end`, and for the heads behind."""
        if isinstance(before, float) and before == behind:
            return behind
        heads = self.iota(like.shape) + self.first
        return jnp.where(heads < index(end), before, behind)

    def iota(self, shape: tuple[int, ...]) -> Array:
        """Returns the number of each head, int32[shape]."""
        if self.arithmetic.simulated:
            return lax.broadcasted_iota(jnp.int32, shape, 0)
        return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=self.layout)

    def normalize(self, parts: list[Array]) -> list[Array]:
        """Applies the norms of queries and keys."""
        if self.operands.norms is None:
            return parts
        size = self.operands.product.shape[-1]
        squares = sum((x * x).sum(axis=1) for x in parts)
        inverse = lax.rsqrt(squares * (1 / size) + self.options.eps)
        found = []
        for x, span in zip(parts, self.spans, strict=True):
            query, key = (
                self.per_channel(ref.at[span.channels]) for ref in self.operands.norms
            )
            scale = self.select(self.options.num_queries, query, key, x)
            level = self.arithmetic.layout_cast(per_row(inverse, x.shape), self.layout)
            found.append(x * level * scale)
        return found

    def per_channel(self, ref: Any) -> Array:
        """Loads a number for each channel, and repeats them for all heads."""
        row = self.load(ref, self.layout.reduce(0))
        tile = per_column(row, (HEADS, *row.shape))
        return self.arithmetic.layout_cast(tile, self.layout)

    def turn(self, parts: list[Array]) -> list[Array]:
        """Rotates pairs of channels."""
        if self.operands.rotation is None:
            return parts
        x, y, *others = parts
        rotation = self.operands.rotation
        cos, sin = (self.per_channel(ref.at[self.token]) for ref in rotation)
        return [x * cos - y * sin, y * cos + x * sin, *others]

    def write(
        self,
        source: _Finished,
        slot: _Slot,
        q_ref: Any,
        keys_ref: Any,
        values_ref: Any,
    ) -> None:
        """Copies heads from shared memory to the queries, or to the pages."""
        num_keys, first_key = keys_ref.shape[1], self.options.num_queries
        first_value, place = first_key + num_keys, slot.place
        ends = 0, first_key, first_value, first_value + num_keys
        targets: list[Callable[[Array], Any]] = [
            lambda head: q_ref.at[self.token, 0, head],
            lambda head: keys_ref.at[slot.page, head - first_key, place],
            lambda head: values_ref.at[slot.page, head - first_value, place],
        ]
        for nth in range(HEADS):
            head = self.first + nth
            for number, target in enumerate(targets):
                is_here = (head >= ends[number]) & (head < ends[number + 1])
                is_here &= head >= self.own

                finished = source.for_pages(nth) if number else source.heads.at[nth]

                @pl.when(is_here & slot.is_written if number else is_here)
                def _(finished=finished, head=head, target=target):
                    plgpu.copy_smem_to_gmem(finished, target(head))

        plgpu.wait_smem_to_gmem(0)
