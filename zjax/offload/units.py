"""Transfer units: the parts of a model that move between memories and run one by one.

A unit is a block of the model or, if blocks have tiles, the trunk or one tile of a
block.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from zjax.errors import PlanError, Problem
from zjax.offload.stream import Load, Stream, moved_bytes
from zjax.sharding.layers import layers_of
from zjax.sharding.placement import ArrayPlan, unpad_tree, use_tree
from zjax.sharding.plan import Plan
from zjax.typing import Model, Params, Segment, Stack

AHEAD_BYTES = 512 * 10**6
"""Limit on prefetched bytes per device, if three units of the model take less."""


class Unit(NamedTuple):
    """The place of a transfer unit in a stack.

    Args:
        number: Index in the forward pass, and index of the unit's gradient group.
        block: Index in the stack of the block that holds the unit.
        segment: Index of the segment that holds the block.
        tile: 0 for a block without tiles or a trunk, n for the n-th tile of the block.
    """

    number: int
    block: int
    segment: int
    tile: int

    @property
    def kind(self) -> tuple[int, bool]:
        """Segment and whether the unit is a tile: one kind runs equal programs."""
        return self.segment, self.tile > 0


def units_of(stack: Stack, params: Params) -> list[tuple[Unit, Params]]:
    """Lists transfer units with parameters, in the order of the forward pass.

    `params` is any tree with the structure of the parameters, layers as separate
    leaves.
    """
    _, trees, _ = stack.split(params)
    units: list[tuple[Unit, Params]] = []
    blocks = itertools.count()
    for i, (segment, tree) in enumerate(zip(stack.segments, trees, strict=True)):
        for block_params in layers_of(tree, segment.num_blocks):
            block = next(blocks)
            for tile, part in enumerate(_units_of_block(segment, block_params)):
                units.append((Unit(len(units), block, i, tile), part))
    return units


def check_frozen_alike(stack: Stack, master: Any) -> None:
    """Raises PlanError if units that share a program differ in frozen arrays."""
    kinds: dict[Any, list[bool]] = {}
    for unit, tree in units_of(stack, master):
        rows = jax.tree.leaves(tree)
        pattern = [row.is_frozen for row in rows]
        first = kinds.setdefault(unit.kind, pattern)
        if first != pattern:
            pairs = zip(rows, first, strict=True)
            path = next(row.path for row, other in pairs if row.is_frozen != other)
            problem = "is frozen, or not, unlike the same array of another tile"
            remedy = "freeze it in all tiles or in none, or keep state on the devices"
            raise PlanError(Problem("model.mlp_tiles", path, problem, remedy))


def rows_by_part(stack: Stack, rows: Any) -> dict[Any, Any]:
    """Returns the plans of `embed`, of `head` and of a unit of each kind."""
    embed, _, head = stack.split(rows)
    units = {unit.kind: tree for unit, tree in units_of(stack, rows)}
    return {"embed": embed, "head": head, **units}


def gathered(params: Params, rows: Any) -> Params:
    """Unpads stored parameters and gathers over the ZeRO axes."""
    return use_tree(unpad_tree(params, rows), rows)


def groups_of(stack: Stack, params: Params) -> list[int]:
    """Returns the index of the gradient group of each parameter, by leaf.

    Group `Unit.number` holds the parameters of a unit. The next group holds the
    embedding, with parameters that the head shares; the last group holds the head's
    remaining parameters.
    """
    positions = positions_in(params)
    groups = [0] * len(jax.tree.leaves(params))
    embed, _, head = stack.split(positions)
    parts = [(unit.number, tree) for unit, tree in units_of(stack, positions)]
    # The embedding is assigned last, and so takes the parameters shared with the head.
    for group, part in [*parts, (len(parts) + 1, head), (len(parts), embed)]:
        for position in jax.tree.leaves(part):
            groups[position] = group
    return groups


def forward_order(model: Model, params: Params) -> list[int]:
    """Lists positions of the parameters in the order of the forward pass.

    That is the embedding, the blocks in order, the head. If the model runs by block,
    `params` has layers as separate leaves.
    """
    order = range(len(jax.tree.leaves(params)))
    if not model.runs_by_block:
        return [*order]
    assert model.stack is not None
    groups = groups_of(model.stack, params)
    embed = len(units_of(model.stack, params))
    return sorted(order, key=lambda i: -1 if groups[i] == embed else groups[i])


def positions_in(params: Params) -> Any:
    """Returns a tree of equal structure with the index of each leaf as value."""
    leaves, tree = jax.tree.flatten(params)
    return tree.unflatten(range(len(leaves)))


def _units_of_block(segment: Segment, block: Params) -> list[Params]:
    """Splits the parameters of a block into trunk and tiles, if it has tiles."""
    if segment.tiles is None:
        return [block]
    trunk, tiles = segment.tiles.split(block)
    return [trunk, *tiles]


class UnitStream:
    """Prefetches the parameters of the units of a stack."""

    def __init__(self, stack: Stack, plan: Plan):
        self.stack, self.plan = stack, plan
        rows_of_units = units_of(stack, plan.compute)
        self.units = [unit for unit, _ in rows_of_units]
        blocks = itertools.groupby(self.units, lambda unit: unit.block)
        self.blocks = [list(units) for _, units in blocks]
        self.rows: list[list[ArrayPlan]] = [
            jax.tree.leaves(rows) for _, rows in rows_of_units
        ]
        largest = max(map(moved_bytes, self.rows))
        self.stream = Stream(max(3 * largest, AHEAD_BYTES))

    def stored(self, params: Params) -> list[Params]:
        """Returns the stored parameters of each unit."""
        return [tree for _, tree in units_of(self.stack, params)]

    def loads(self, stored: Sequence[Params], names: Iterable[Any]) -> Iterator[Load]:
        """Yields loads of units for `stream`; a name is a pass with a `Unit.number`."""
        for name in names:
            arrays = jax.tree.leaves(stored[name[1]])
            yield Load(name, arrays, self.rows[name[1]], is_consumed=False)

    @contextlib.contextmanager
    def on_device(
        self, stored: Sequence[Params], name: Any, unit: Unit
    ) -> Iterator[tuple[Params, list[Any]]]:
        """Yields a unit's parameters on the devices; deletes the copies at the end.

        Units come in the order of `loads`. The caller appends a result of the last
        program that reads the parameters to the list, after which the memory counts as
        free.
        """
        arrays, num_bytes = self.stream.wait((name, unit.number))
        used: list[Any] = []
        yield jax.tree.unflatten(jax.tree.structure(stored[unit.number]), arrays), used
        for x, row in zip(arrays, self.rows[unit.number], strict=True):
            # A parameter stored on the device is no copy, and must stay.
            if not row.is_on_device:
                x.delete()
        self.stream.release(num_bytes, used)
