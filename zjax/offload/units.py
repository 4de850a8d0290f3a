"""What comes up together: a block of a model, or its trunk and each of its tiles."""

from collections.abc import Callable, Iterator
from typing import Any

import jax

from zjax.sharding.layers import layers_of
from zjax.sharding.placement import unpad_tree, use_tree
from zjax.typing import Model, Params, Segment, Stack


def units_of(segment: Segment, block: Params) -> list[Params]:
    """The units of one block.

    Args:
        segment: Says whether blocks have tiles.
        block: Its parameters, or anything in their place.

    Returns:
        The block itself, or its trunk and then its tiles.

    Example:
        >>> units_of(Segment(block=lambda *_: None, num_blocks=2), {"kernel": 1})
        [{'kernel': 1}]
    """
    if segment.tiles is None:
        return [block]
    trunk, tiles = segment.tiles.split(block)
    return [trunk, *tiles]


def units_by_block(stack: Stack, params: Params) -> list[list[Params]]:
    """The units of all blocks, in the order of the forward pass.

    Args:
        stack: The model as a line of blocks.
        params: Its parameters, or anything in their place; layers apart.

    Returns:
        Those of each block of the first segment, and so on.
    """
    return [units for _, units in _numbered(stack, params)]


def segment_by_block(stack: Stack) -> list[int]:
    """The segment of each block.

    Args:
        stack: The model as a line of blocks.

    Returns:
        Its number, in the order of the forward pass.
    """
    numbered = enumerate(stack.segments)
    return [i for i, segment in numbered for _ in range(segment.num_blocks)]


def rows_of_parts(stack: Stack, rows: Any) -> dict[Any, Any]:
    """Rows of what the functions of a stack take.

    Args:
        stack: The model as a line of blocks.
        rows: A tree of `ArrayPlan` for its parameters, layers apart.

    Returns:
        Those of `embed` and `head`, and for each segment by number those of one
        `("block", number)` and of one `("tile", number)`.
    """
    embed, _, head = stack.split(rows)
    parts: dict[Any, Any] = {"embed": embed, "head": head}
    for number, (block, *tiles) in _numbered(stack, rows):
        parts["block", number] = block
        parts["tile", number] = tiles[0] if tiles else ()
    return parts


def gathered(params: Params, rows: Any) -> Params:
    """Parameters where they are used, as the function of a part takes them.

    Args:
        params: As they are stored, but on the devices.
        rows: Of the part.

    Returns:
        Parameters in their logical shapes, each whole on every device but for what
        model parallelism splits.
    """
    return use_tree(unpad_tree(params, rows), rows)


def trunk_of(segment: Segment) -> Callable[..., Any]:
    """The program of the first unit of a block.

    Args:
        segment: Says whether blocks have tiles.

    Returns:
        As `Tiles.trunk`; where there are no tiles, nothing is for them to read.
    """
    if segment.tiles is not None:
        return segment.tiles.trunk

    def trunk(params: Params, carry: Any, context: Any, key: jax.Array | None) -> Any:
        carry, auxiliary = segment.block(params, carry, context, key)
        return (carry, ()), auxiliary

    return trunk


def groups_of(stack: Stack, params: Params) -> list[int]:
    """Numbers the parameters by what they come up with.

    Args:
        stack: The model as a line of blocks.
        params: A tree of the parameters, layers apart.

    Returns:
        The group of each leaf: units in the order of the blocks, then the embedding
        with what the head shares, then the rest of the head.
    """
    positions = _positions(params)
    embed, _, head = stack.split(positions)
    units = [unit for block in units_by_block(stack, positions) for unit in block]
    groups = [0] * len(jax.tree.leaves(params))
    # What the embedding shares with the head is the embedding's.
    parts = [*enumerate(units), (len(units) + 1, head), (len(units), embed)]
    for group, part in parts:
        for position in jax.tree.leaves(part):
            groups[position] = group
    return groups


def forward_order(model: Model, params: Params) -> list[int]:
    """Orders the parameters as the forward pass reads them.

    Args:
        model: Model as pure functions.
        params: A tree of the parameters, layers apart where it runs by block.

    Returns:
        Positions of the leaves: the embedding, the blocks in order, the head.
    """
    order = range(len(jax.tree.leaves(params)))
    if not model.runs_by_block:
        return [*order]
    assert model.stack is not None
    groups = groups_of(model.stack, params)
    embed = sum(map(len, units_by_block(model.stack, params)))
    return sorted(order, key=lambda i: -1 if groups[i] == embed else groups[i])


def kinds_of(stack: Stack, params: Params) -> list[tuple[int, int] | None]:
    """Which parameters are created alike, but for the number of their layer.

    Args:
        stack: The model as a line of blocks.
        params: A tree of the parameters, layers apart.

    Returns:
        For each leaf of a block its segment, and its unit within the block; None for
        all others.
    """
    kinds: list[tuple[int, int] | None] = [None] * len(jax.tree.leaves(params))
    for segment, units in _numbered(stack, _positions(params)):
        for number, unit in enumerate(units):
            for position in jax.tree.leaves(unit):
                kinds[position] = (segment, number)
    return kinds


def _numbered(stack: Stack, params: Params) -> Iterator[tuple[int, list[Params]]]:
    """The number of its segment and the units of each block."""
    _, trees, _ = stack.split(params)
    pairs = zip(stack.segments, trees, strict=True)
    for number, (segment, blocks) in enumerate(pairs):
        for block in layers_of(blocks, segment.num_blocks):
            yield number, units_of(segment, block)


def _positions(params: Params) -> Any:
    leaves, tree = jax.tree.flatten(params)
    return jax.tree.unflatten(tree, range(len(leaves)))
