"""Transfer units: the parts of a model that move between memories and run one by one.

A unit is a block of the model or, where blocks have tiles, the trunk of a block or one
of its tiles.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from zjax.offload.stream import Load, Stream, moved_bytes
from zjax.sharding.layers import layers_of
from zjax.sharding.placement import ArrayPlan, unpad_tree, use_tree
from zjax.sharding.plan import Plan
from zjax.typing import Model, Params, Segment, Stack

AHEAD_BYTES = 512 * 10**6
"""On a device, of units that are prefetched, where three units are less."""


class Unit(NamedTuple):
    """The place of a transfer unit in a stack.

    Args:
        number: Position in the forward pass, and group of its gradients.
        block: Number of its block in the stack.
        segment: Number of the segment of that block.
        tile: 0 for a whole block or a trunk, n for its n-th tile.
    """

    number: int
    block: int
    segment: int
    tile: int

    @property
    def kind(self) -> tuple[int, bool]:
        """Segment, and whether it is a tile: units of a kind run the same programs."""
        return self.segment, self.tile > 0


def units_of(stack: Stack, params: Params) -> list[tuple[Unit, Params]]:
    """Transfer units with their parameters, in the order of the forward pass.

    Args:
        stack: The model as a line of blocks.
        params: Its parameters, or anything in their place; layers apart.
    """
    _, trees, _ = stack.split(params)
    found: list[tuple[Unit, Params]] = []
    blocks = itertools.count()
    for number, (segment, tree) in enumerate(zip(stack.segments, trees, strict=True)):
        for own in layers_of(tree, segment.num_blocks):
            block = next(blocks)
            for tile, part in enumerate(_units_of_block(segment, own)):
                found.append((Unit(len(found), block, number, tile), part))
    return found


def rows_by_part(stack: Stack, rows: Any) -> dict[Any, Any]:
    """Plans of the parameters of `embed`, of `head` and of a unit of each kind."""
    embed, _, head = stack.split(rows)
    units = {unit.kind: tree for unit, tree in units_of(stack, rows)}
    return {"embed": embed, "head": head, **units}


def gathered(params: Params, rows: Any) -> Params:
    """Stored parameters in their logical shapes, split by model parallelism alone."""
    return use_tree(unpad_tree(params, rows), rows)


def trunk_of(segment: Segment) -> Callable[..., Any]:
    """The function of the first unit of a block, which is called like `Tiles.trunk`."""
    if segment.tiles is not None:
        return segment.tiles.trunk

    def trunk(params: Params, carry: Any, context: Any, key: jax.Array | None) -> Any:
        carry, auxiliary = segment.block(params, carry, context, key)
        return (carry, ()), auxiliary

    return trunk


def groups_of(stack: Stack, params: Params) -> list[int]:
    """The group of gradients of each parameter, by leaf.

    Units are groups by number; after them come the embedding with the arrays that the
    head shares, and the rest of the head.
    """
    positions = positions_in(params)
    groups = [0] * len(jax.tree.leaves(params))
    embed, _, head = stack.split(positions)
    parts = [(unit.number, tree) for unit, tree in units_of(stack, positions)]
    # Arrays of both the embedding and the head are the embedding's: it comes last.
    for group, part in [*parts, (len(parts) + 1, head), (len(parts), embed)]:
        for position in jax.tree.leaves(part):
            groups[position] = group
    return groups


def forward_order(model: Model, params: Params) -> list[int]:
    """Positions of the parameters in the order in which the forward pass reads them.

    That is the embedding, the blocks in order, the head. `params` has layers apart
    where the model runs by block.
    """
    order = range(len(jax.tree.leaves(params)))
    if not model.runs_by_block:
        return [*order]
    assert model.stack is not None
    groups = groups_of(model.stack, params)
    embed = len(units_of(model.stack, params))
    return sorted(order, key=lambda i: -1 if groups[i] == embed else groups[i])


def positions_in(params: Params) -> Any:
    """The tree with the position of each leaf in its place."""
    leaves, tree = jax.tree.flatten(params)
    return tree.unflatten(range(len(leaves)))


def _units_of_block(segment: Segment, block: Params) -> list[Params]:
    if segment.tiles is None:
        return [block]
    trunk, tiles = segment.tiles.split(block)
    return [trunk, *tiles]


class UnitStream:
    """Prefetches the parameters of the units of a stack."""

    def __init__(self, stack: Stack, plan: Plan):
        self.stack, self.plan = stack, plan
        found = units_of(stack, plan.compute)
        self.units = [unit for unit, _ in found]
        blocks = itertools.groupby(self.units, lambda unit: unit.block)
        self.blocks = [list(units) for _, units in blocks]
        self.rows: list[list[ArrayPlan]] = [jax.tree.leaves(rows) for _, rows in found]
        largest = max(map(moved_bytes, self.rows))
        self.stream = Stream(max(3 * largest, AHEAD_BYTES))

    def stored(self, params: Params) -> list[Params]:
        """The stored parameters of each unit."""
        return [tree for _, tree in units_of(self.stack, params)]

    def loads(self, stored: Sequence[Params], names: Iterable[Any]) -> Iterator[Load]:
        """What `stream` prefetches, by the pass and the number of each unit."""
        for name in names:
            arrays = jax.tree.leaves(stored[name[1]])
            yield Load(name, arrays, self.rows[name[1]], is_consumed=False)

    @contextlib.contextmanager
    def on_device(
        self, stored: Sequence[Params], name: Any, unit: Unit
    ) -> Iterator[tuple[Params, list[Any]]]:
        """The parameters of a unit on the devices, deleted at the end of the context.

        Args:
            stored: Parameters of each unit.
            name: The pass for which it was prefetched.
            unit: The next of those that were.

        Yields:
            The parameters, and a list to which to add a result of their last use.
        """
        arrays, num_bytes = self.stream.wait((name, unit.number))
        used: list[Any] = []
        yield jax.tree.unflatten(jax.tree.structure(stored[unit.number]), arrays), used
        for x, row in zip(arrays, self.rows[unit.number], strict=True):
            if not row.is_on_device:
                x.delete()
        self.stream.release(num_bytes, used)
