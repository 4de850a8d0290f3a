"""Attention that sums the keys of a text in blocks from the first key of the text on.

Chunks with keys in pages run the kernel of paged attention, with one program for all
keys of a tile. Packed rows run that program with keys of the row: tiles of queries hold
tokens of one text, and copies begin at the first key of the text, wherever the text is
in the row.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from zjax_kernels.decode.mosaic_gpu import kernel
from zjax_kernels.decode.mosaic_gpu.memory import CHUNK, Rows
from zjax_kernels.decode.mosaic_gpu.merge import Merged
from zjax_kernels.decode.mosaic_gpu.work import STEP, TILE, Sizes, Split
from zjax_kernels.decode.reference import Cache, Options
from zjax_kernels.decode.tuning import H200, Tuning
from zjax_kernels.device import NUM_SMS
from zjax_kernels.grouped.mosaic_gpu.pipeline import Views, for_each_tile
from zjax_kernels.sparse.mosaic_gpu.arithmetic import Arithmetic, index
from zjax_kernels.warpgroups import launch

_SIMULATED_PROGRAMS = 2


def paged_attention(
    q: Array,
    cache: Cache,
    sinks: Array | None,
    options: Options,
    *,
    interpret: Any = None,
) -> Array:
    """Runs the kernel of `decode.reference.paged_attention`, without splits of keys."""
    # One program has the keys of the longest row: splits would depend on the rows.
    steps = cache.pages.shape[1] * cache.keys.shape[2]
    tuning = dataclasses.replace(H200[q.shape[-1]], min_steps=steps)
    return kernel.paged_attention(
        q, cache, sinks, options, tuning=tuning, interpret=interpret
    )


def packed_attention(
    q: Array,
    keys: Array,
    values: Array,
    positions: Array,
    sinks: Array | None,
    options: Options,
    *,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Array:
    """Attends within the texts of rows [B, L, H, D], which begin at positions of 0."""
    rows, length, heads, size = q.shape
    num_heads, tuning = keys.shape[2], tuning or H200[size]
    sizes = _Sizes(
        *(rows, length, num_heads, heads // num_heads), 1, length, size, tuning
    )
    tiles, count = _tiles(positions, sizes.tile_tokens)
    most = rows * length * num_heads * sizes.head_tiles

    def body(inputs, outputs, scratch):
        q_ref, keys_ref, values_ref, sinks_ref, *tables = inputs
        nothing: Any = None  # no pages
        pools = Cache(keys_ref, values_ref, nothing, nothing, nothing)
        memory = scratch.of(interpret)
        arithmetic = Arithmetic(interpret)
        tables = _Tables(*tables)

        def attend(number, before):
            place = tables.place(sizes, options.window, number)
            program = _Packed(sizes, options, place, memory, arithmetic, pools)
            program.start(q_ref)
            outs, lse = program.attend()
            sinks = None if sinks_ref is None else program.sinks(sinks_ref)
            outs = [Merged.of(out, lse).finish(sinks) for out in outs]
            program.store_pieces(outs, outputs[0])
            return before

        total = tables.count[0] * index(num_heads * sizes.head_tiles)
        for_each_tile(total, attend)

    programs = min(most, NUM_SMS * tuning.programs_per_sm)
    (out,) = launch(
        body,
        (q, keys, values, sinks, tiles, positions, count),
        [jax.ShapeDtypeStruct(q.shape, q.dtype)],
        _Memory.allocate(sizes, q.dtype, interpret),
        num_programs=programs if interpret is None else _SIMULATED_PROGRAMS,
        interpret=interpret,
        approx_math=True,  # as in paged attention, whose bits these are
        reduction_scratch_bytes=0,
    )
    return out


def _tiles(positions: Array, tile_tokens: int) -> tuple[Array, Array]:
    """Returns the first tokens of tiles, int32[B L + 1], and the count, int32[1].

    Tokens are numbered over all rows. A tile has `tile_tokens` tokens of one text, or
    as many as the text has left; behind the last tile comes the end of all rows.
    """
    flat = positions.reshape(-1)
    is_first = lax.rem(flat, jnp.int32(tile_tokens)) == 0
    tiles = jnp.full(flat.size + 1, flat.size, jnp.int32)
    # Other tokens have a place behind the end, which is dropped.
    number = jnp.cumsum(is_first, dtype=jnp.int32) - 1
    place = jnp.where(is_first, number, flat.size + 1)
    tokens = np.arange(flat.size, dtype=np.int32)
    return tiles.at[place].set(tokens, mode="drop"), number[-1:] + 1


class _Sizes(Sizes):
    """Sizes of packed rows: chunks are rows, and `tokens` is the length of a row."""

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile: as many as fit, as tiles begin with each text."""
        return TILE // self.tile_heads


class _Tables(NamedTuple):
    """References to first tokens of tiles, all positions, and the number of tiles."""

    tiles: Any
    positions: Any
    count: Any

    def place(self, sizes: Sizes, window: int, number: Array) -> Split:
        """Returns the tile and the head of a number, and the keys of the tile."""
        per_tile = index(sizes.num_heads * sizes.head_tiles)
        tile, pair = lax.div(number, per_tile), lax.rem(number, per_tile)
        head, head_tile = (f(pair, index(sizes.head_tiles)) for f in (lax.div, lax.rem))
        last_head = index(sizes.group - sizes.tile_heads)
        first_head = jnp.minimum(head_tile * index(sizes.tile_heads), last_head)
        flat, following = self.tiles[tile], self.tiles[tile + 1]
        row, token = (f(flat, index(sizes.tokens)) for f in (lax.div, lax.rem))
        position, count = self.positions[row, token], following - flat
        end = position + count
        begin = jnp.maximum(position - window + 1, 0) if window else index(0)
        first = lax.div(begin, index(STEP))
        return Split(
            number,
            row,
            head,
            index(0),
            token,
            head * index(sizes.group) + first_head,
            # Tokens are numbered by row: the text begins at `-start`.
            position - token,
            token + count,
            end,
            begin,
            first=first,
            num_steps=lax.div(end + index(STEP - 1), index(STEP)) - first,
            num_settled=index(0),
        )


class _Memory(NamedTuple):
    """Shared memory and barriers of a program; pieces have 64 channels.

    Args:
        q: Queries, `Rows` of each piece.
        out: Outputs of each piece in the place of queries, [TILE, 64], in plain rows
            that are copied one by one.
        keys: `Views` of [stages, pieces, STEP, 64] keys.
        values: `Views` of values.
        q_ready: Barrier on which the queries arrive.
        keys_ready: Barriers per stage on which keys arrive.
        values_ready: Barriers per stage on which values arrive.
    """

    q: Any
    out: Any
    keys: Any
    values: Any
    q_ready: Any
    keys_ready: Any
    values_ready: Any

    @classmethod
    def allocate(cls, sizes: Sizes, dtype: Any, interpret: Any) -> "_Memory":
        """Returns types of shared memory and barriers, to be named by `of`."""
        pieces, stages = sizes.channels // CHUNK, sizes.tuning.stages
        shape, simulated = (stages, pieces, STEP, CHUNK), interpret is not None
        ring = Views.allocate(shape, dtype, simulated=simulated)
        plain: Any = plgpu.SMEM((TILE, CHUNK), dtype)
        rows = plain
        if not simulated:
            rows = plgpu.RefUnion(*Rows.types(sizes, CHUNK, dtype), plain)
        num_boxes = sizes.tile_tokens if simulated else 1
        barrier = plgpu.Barrier(num_arrivals=pieces, num_barriers=stages)
        q_ready = plgpu.Barrier(num_arrivals=pieces * num_boxes)
        return cls([rows] * pieces, None, ring, ring, q_ready, barrier, barrier)

    def of(self, interpret: Any) -> "_Memory":
        """Names the views of memory."""
        simulated = interpret is not None
        views = functools.partial(Views.of, simulated=simulated)
        rings = {"keys": views(self.keys), "values": views(self.values)}
        if simulated:
            q = [Rows(ref, None) for ref in self.q]
            return self._replace(q=q, out=self.q, **rings)
        pieces = [tuple(ref) for ref in self.q]
        q = [Rows(*piece[:2]) for piece in pieces]
        return self._replace(q=q, out=[piece[2] for piece in pieces], **rings)


@dataclasses.dataclass(frozen=True)
class _Packed(kernel.Program):
    """One program, on a tile of queries of one text of a packed row.

    Pages are not read: `cache.keys` and `cache.values` are [B, L, KV, D].
    """

    @property
    def piece_channels(self) -> int:
        """Channels of a piece: copies of 128 bytes may begin at any token."""
        return CHUNK

    def read_pages(self, pages: Any, step: Array) -> list[Array]:
        """Returns no pages."""
        return []

    def copy_pages(
        self, pool: Any, pages: list[Array], step: Array, ring: Any, ready: Any
    ) -> None:
        """Starts to copy a step of keys or values of the text to a ring."""
        stage, row, head = self.stage(step), self.place.chunk, self.place.head
        # What is copied of a text behind, or of none, is hidden.
        tokens = pl.ds(self.first_key(step) - self.place.start, STEP)
        for piece in range(ring.by_rows.shape[1]):
            source = pool.at[row, tokens, head, pl.ds(piece * CHUNK, CHUNK)]
            target = ring.by_rows.at[stage, piece]
            plgpu.copy_gmem_to_smem(source, target, ready.at[stage])

    def scores(self, stage: Array) -> Array:
        """Multiplies the queries by the keys of a stage, float32[TILE, STEP]."""
        q = [rows.tiled for rows in self.memory.q]
        pieces = self._pieces(self.memory.keys, stage)
        return self.arithmetic.product_of_pairs([*zip(q, pieces, strict=True)])

    def values_of_step(self, stage: Array, step: Array) -> list[Any]:
        """Returns the values of a step in shared memory, in pieces of channels."""
        pieces = self._pieces(self.memory.values, stage)
        self.hide_values(pieces, step)
        return pieces

    def _pieces(self, ring: Any, stage: Array) -> list[Any]:
        return [ring.tiled.at[stage, piece] for piece in range(ring.tiled.shape[1])]

    def store_pieces(self, outs: list[Array], out_ref: Any) -> None:
        """Stores the tokens of the tile: the next token may be of another text."""
        for piece, out in zip(self.memory.out, outs, strict=True):
            piece[...] = out.astype(piece.dtype)
        plgpu.commit_smem()  # copies must see the writes of registers
        place, num_heads = self.place, self.sizes.tile_heads
        heads = pl.ds(place.first_head, num_heads)
        for nth in range(self.sizes.tile_tokens):

            @pl.when(place.first_token + nth < place.num_tokens)
            def _(nth=nth):
                token, rows = place.first_token + nth, pl.ds(nth * num_heads, num_heads)
                for number, piece in enumerate(self.memory.out):
                    channels = pl.ds(number * CHUNK, CHUNK)
                    target = out_ref.at[place.chunk, token, heads, channels]
                    plgpu.copy_smem_to_gmem(piece.at[rows], target)

        # The next tile writes to this memory.
        plgpu.wait_smem_to_gmem(0)
