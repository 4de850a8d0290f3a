"""Passes of a decoder whose blocks come to the devices, or are gathered, one by one.

The units of the model are prefetched in turn: the devices hold a few units, the
embedding, the head and the pages. The first units of the next pass are prefetched while
tokens are chosen. The more rows pass at once, the less each pays for the transfers.
The programs of units compile when the first passes run.

Reference: ZeRO-Inference, in DeepSpeed Inference, arXiv:2207.00032.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from zjax.generation.chunks import Chunks, batch_of
from zjax.generation.pages import attend
from zjax.generation.passes import (
    DIMS_OF_ROWS,
    Head,
    Reader,
    Rows,
    lay_chunks,
    lay_experts,
    score_and_choose,
)
from zjax.generation.plan import Pieces
from zjax.generation.programs import History, page_bytes, read_in_turn
from zjax.generation.sampling import Chosen
from zjax.generation.shards import by_shard, pin_results, shard_axes
from zjax.offload.compiled import Jit
from zjax.offload.stream import Load
from zjax.offload.units import UnitStream, gathered, rows_by_part
from zjax.settings import schema
from zjax.sharding.activations import pin_rows
from zjax.sharding.plan import staged_plan
from zjax.typing import Params


class UnitPrograms:
    """Programs of the units of an offloaded decoder.

    Args:
        units: Prefetcher of the model's units.
        jit: `jax.jit` with compiler options.
    """

    def __init__(self, units: UnitStream, jit: Jit):
        self.units = units
        self.reader = Reader(units.stack)
        self._rows = rows_by_part(units.stack, staged_plan(units.plan).compute)
        self.lay = jit(self._lay, static_argnums=3)
        self.embed = jit(self._embed)
        # The pages are donated, and so is the stream in `add_tile`: both are replaced.
        self.read = jit(self._read, static_argnums=(0, 1), donate_argnums=6)
        self.add_tile = jit(self._add_tile, static_argnums=0, donate_argnums=2)
        self.choose = jit(self._choose, donate_argnums=3)
        self.lay_experts = jit(self._lay_experts)

    def _lay(
        self,
        history: jax.Array,
        rows: Rows,
        pieces: Sequence[Pieces],
        sizes: Sequence[int],
    ) -> Any:
        lay = functools.partial(lay_chunks, sizes=sizes)
        return by_shard(lay, shard_axes(), (0, 0, 0), 0)(history, rows, pieces)

    def _embed(self, params: Params, parts: Sequence[Chunks]) -> Any:
        def embed(params: Params, parts: Sequence[Chunks]) -> Any:
            carry, context = self.reader.continuation.embed(params, batch_of(parts))
            return pin_rows(carry), context

        params = gathered(params, self._rows["embed"])
        return by_shard(embed, shard_axes(), (None, 0), (0, 0))(params, parts)

    def _read(self, segment: int, records: bool, params: Params, *args: Any) -> Any:
        """Returns stream and input of the tiles, the pages, and experts if wanted."""

        def read(params: Params, carry: Any, context: Any, parts: Any, caches: Any):
            run = self.reader.continuation.blocks[segment]
            attend_to, chosen = functools.partial(attend, parts), []
            record = chosen.append if records else None
            results, caches = run(params, carry, context, attend_to, caches, record)
            return jax.tree.map(pin_rows, results), caches, chosen

        params = gathered(params, self._rows[segment, False])
        params = self.reader.continuation.lay[segment](params)
        mapped = by_shard(read, shard_axes(), (None, 0, 0, 0, 0), (0, 0, 0))
        return mapped(params, *args)

    def _lay_experts(self, parts: Sequence[Chunks], experts: Sequence[Any]) -> Any:
        laid = by_shard(lay_experts, shard_axes(), (0, 0), 1)(parts, experts)
        return pin_results(laid)

    def _add_tile(
        self, segment: int, params: Params, carry: jax.Array, entering: jax.Array
    ) -> jax.Array:
        """Adds the result of a tile to the stream."""
        tiles = self.units.stack.segments[segment].tiles
        assert tiles is not None

        def add(params: Params, carry: jax.Array, entering: jax.Array) -> jax.Array:
            return pin_rows(tiles.add(carry, tiles.tile(params, entering, None)))

        params = gathered(params, self._rows[segment, True])
        return by_shard(add, shard_axes(), (None, 0, 0), 0)(params, carry, entering)

    def _choose(self, head: Params, *args: Any) -> Any:
        """Returns the history and the new tokens."""

        def choose(head: Params, parts: Any, carry: Any, *known: Any) -> Any:
            found = Head.of(self.reader.continuation, head)
            return score_and_choose(found, parts, carry, *known)

        head = gathered(head, self._rows["head"])
        # Chunks, stream, history, rows and pieces.
        ins, outs = (None, 0, 0, 0, 0, 0), (0, DIMS_OF_ROWS)
        history, chosen = by_shard(choose, shard_axes(), ins, outs)(head, *args)
        return history, pin_results(chosen)


class UnitDecoder:
    """A decoder for `zjax.generate`, whose blocks come to the devices one by one.

    Args:
        programs: Programs of the units.
        params: Parameters as stored, with layers as separate leaves.
        config: Shape of the model.
    """

    def __init__(self, programs: UnitPrograms, params: Params, config: schema.Model):
        self.programs, self.config, self.pending_bytes = programs, config, 0
        self.embed, _, self.head = programs.units.stack.split(params)
        self.stored = programs.units.stored(params)

        rows = programs.units.plan.compute
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rows)
        self.shapes = jax.eval_shape(programs.reader.cut, shapes)

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that split rows, under the mesh of the passes."""
        return shard_axes()

    def passes(self, **shapes: int) -> "UnitPasses":
        """Makes passes of the shapes that `Programs` takes."""
        return UnitPasses(self, **shapes)

    def page_bytes(self, page_size: int) -> int:
        """Counts the bytes on a device of a page of all layers."""
        return page_bytes(self.programs.reader, self.shapes, page_size)


class UnitPasses:
    """Passes unit by unit; see `zjax.generation.programs.Passes`."""

    def __init__(
        self,
        decoder: UnitDecoder,
        *,
        num_slots: int,
        max_length: int,
        num_pages: int,
        page_size: int,
    ):
        self._decoder, self._programs = decoder, decoder.programs
        self._units, self._number = decoder.programs.units, 0
        self._history = History(num_slots, max_length, shard_axes())
        make = decoder.programs.reader.empty_caches
        make = functools.partial(make, decoder.shapes, num_pages, page_size)
        # By a program: each device would make whole arrays before they are split.
        self._caches = [*jax.jit(make)()]

    def remember(self, slots: np.ndarray, tokens: Sequence[np.ndarray]) -> None:
        """Stores the tokens of a row that begins in a slot of each shard."""
        self._history.set_rows(slots, tokens)

    def load(self) -> None:
        """Does nothing: the state of a run has the weights."""

    def compile(
        self, rows: Rows, pieces: Sequence[Pieces], sizes: Sequence[int], num_steps: int
    ) -> None:
        """Does nothing: the programs of units are small, and compiled as units come."""

    def read(
        self, rows: Rows, pieces: Sequence[Pieces], sizes: Sequence[int], num_steps: int
    ) -> Chosen:
        """Reads pieces of up to `sizes` tokens; see `Passes`."""

        def read(pieces):
            return self._read_once(rows, tuple(pieces), tuple(sizes))

        return read_in_turn(read, pieces, sizes, num_steps)

    def rest(self) -> None:
        """Frees the units that were fetched for a next pass."""
        self._units.stream.prefetch(())
        self._number = 0

    def close(self) -> None:
        """Frees what was fetched for a next pass."""
        self.rest()

    def _read_once(
        self, rows: Rows, pieces: tuple[Pieces, ...], sizes: tuple[int, ...]
    ) -> Chosen:
        """Reads one token or chunk of each piece through all units."""
        programs, decoder, caches = self._programs, self._decoder, self._caches
        parts = programs.lay(self._history.tokens, rows, pieces, sizes)
        carry, context = programs.embed(decoder.embed, parts)
        entering, experts = None, []
        records = pieces[0].records is not None
        for unit, params, used in self._arriving():
            if unit.tile:
                operands = unit.segment, params, carry, entering
                carry = programs.add_tile(*operands)
            else:
                operands = unit.segment, records, params, carry, context, parts
                results, cache, found = programs.read(*operands, caches[unit.block])
                (carry, entering), caches[unit.block] = results, cache
                experts += found
            used.append(carry)
        inputs = parts, carry, self._history.tokens, rows, pieces
        self._history.tokens, chosen = programs.choose(decoder.head, *inputs)
        if records:
            chosen = chosen._replace(experts=programs.lay_experts(parts, experts))
        return chosen

    def _arriving(self) -> Iterator[Any]:
        """Yields each unit with its parameters, and a list for what read them last."""
        number, stored = self._number, self._decoder.stored
        if number == 0:
            self._units.stream.prefetch(self._loads(number))
        # The next units come up before tokens are known, as they do not depend on them.
        self._units.stream.prefetch_more(self._loads(number + 1))
        self._number += 1
        for unit in self._units.units:
            with self._units.on_device(stored, number, unit) as operands:
                yield unit, *operands

    def _loads(self, number: int) -> Iterator[Load]:
        """Yields the loads of all units for a pass."""
        stored = self._decoder.stored
        names = [(number, unit) for unit in range(len(stored))]
        return self._units.loads(stored, names)
