"""The programs of a blockwise pass, lowered with shapes in place of arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zjax.offload.compiled import added_by, like_batch, placed
from zjax.offload.programs import BlockInputs, BlockPrograms
from zjax.offload.units import UnitStream, units_of
from zjax.sharding.placement import ArrayPlan, abstract_key, abstract_tree
from zjax.typing import Batch

SavedRows = Callable[[Any, Any], Sequence[ArrayPlan]]
"""Function from residuals and the input of tiles to the plans of both."""


class PassShapes:
    """Shapes and bytes of a pass on one device, from the compiled programs.

    `bytes` are the bytes that each program adds to the operands; `saved` the plans of
    all stored residuals; `carry` the bytes of the stream of activations, `stream` the
    bytes of the stream with the input of tiles.

    Args:
        programs: Programs of the pass.
        units: Transfer units of the model.
        saved_rows: Function from residuals and input of tiles to plans.
        batch: Arrays or shapes of the global batch.
    """

    def __init__(
        self,
        programs: BlockPrograms,
        units: UnitStream,
        saved_rows: SavedRows,
        batch: Batch,
    ):
        self.programs, self.saved_rows = programs, saved_rows
        self.bytes: dict[str, int] = {}
        plan, entries = programs.plan, programs.model.entries
        params = abstract_tree(plan.compute)
        embed, _, head = programs.stack.split(params)
        batch = like_batch(plan, batch, entries)
        part = like_batch(plan, _results(programs.split_batch, batch, 0), entries)
        key, number = abstract_key(), jax.ShapeDtypeStruct((), jnp.float32)
        carry, context = _results(programs.embed, embed, part, key)
        carry = like_batch(plan, carry)
        self.carry = self.stream = _bytes_of(carry)
        inputs = BlockInputs(context, key, 0)
        trees = [tree for _, tree in units_of(programs.stack, params)]
        by_segment: dict[int, Any] = {}
        for block in units.blocks:
            segment = block[0].segment
            # Blocks of a segment share programs: compile each once.
            if segment not in by_segment:
                # One tile stands for all tiles, which share a program.
                operands = [trees[unit.number] for unit in block[:2]]
                by_segment[segment] = self._call_block(segment, operands, carry, inputs)
        results = [by_segment[block[0].segment] for block in units.blocks]
        self.saved = [row for rows, _ in results for row in rows]
        operands = (head, carry, part, number, [auxiliary for _, auxiliary in results])
        shared = _results(programs.head, *operands)[2]
        self._compile("head", programs.head, *operands)
        operands = (embed, part, key, carry, shared)
        self._compile("embedding, backward", programs.embed_backward, *operands)

    def _call_block(
        self, segment: int, units: Sequence[Any], carry: Any, inputs: BlockInputs
    ) -> tuple[Sequence[ArrayPlan], Any]:
        """Returns plans of a block's residuals, and auxiliary results."""
        programs, (trunk, *tiles) = self.programs, units
        operands = (segment, trunk, carry, inputs)
        stream, auxiliary, _ = _results(programs.block, *operands)
        stream, entering = like_batch(programs.plan, stream)
        forward = programs.block_saving or programs.block
        results, places = self._compile("forward", forward, *operands)
        saved = carry
        if programs.block_saving is not None:
            _, saved = placed(results, places)
        number = jax.ShapeDtypeStruct((), jnp.float32)
        operands = (segment, trunk, saved, inputs, stream, entering, number)
        self._compile("backward", programs.block_backward, *operands)
        for tile in tiles:
            operands = (segment, tile, stream, entering, inputs)
            self._compile("tile", programs.tile, *operands)
            operands = (segment, tile, entering, inputs, stream, entering)
            self._compile("tile, backward", programs.tile_backward, *operands)
        self.stream = max(self.stream, self.carry + _bytes_of(entering))
        return self.saved_rows(saved, entering), auxiliary

    def _compile(self, name: str, program: Any, *operands: Any) -> tuple[Any, Any]:
        """Records the bytes of a program; returns shapes and shardings of results."""
        lowered = program.lower(*operands)
        compiled = lowered.compile()
        self.bytes[name] = max(self.bytes.get(name, 0), added_by(compiled))
        return lowered.out_info, compiled.output_shardings


def _results(program: Any, *operands: Any) -> Any:
    return program.lower(*operands).out_info


def _bytes_of(tree: Any) -> int:
    """Counts the bytes of shapes on one device."""
    rows = [
        ArrayPlan("", x.shape, x.dtype, x.sharding, x.sharding)
        for x in jax.tree.leaves(tree)
    ]
    return sum(row.device_bytes for row in rows)
