"""What comes up together: a block of a model, or its trunk and each of its tiles."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from zjax.typing import Params, Segment, Stack


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


def units_of_all(segment: Segment, blocks: Sequence[Params]) -> list[Params]:
    """The units of all blocks, in the order of the forward pass.

    Args:
        segment: Says whether blocks have tiles.
        blocks: Their parameters, or anything in their place.

    Returns:
        Those of the first block, and so on.
    """
    return [unit for block in blocks for unit in units_of(segment, block)]


def num_units(stack: Stack, params: Params) -> int:
    """Units of each block.

    Args:
        stack: It has one segment.
        params: A tree of the parameters, layers apart.

    Returns:
        1 for blocks that come up whole.
    """
    _, (blocks,), _ = stack.split(params)
    return len(units_of(stack.segments[0], blocks[0]))


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
        stack: It has one segment.
        params: A tree of the parameters, layers apart.

    Returns:
        The group of each leaf: units in the order of the blocks, then the embedding
        with what the head shares, then the rest of the head.
    """
    leaves, tree = jax.tree.flatten(params)
    embed, (blocks,), head = stack.split(jax.tree.unflatten(tree, range(len(leaves))))
    (segment,) = stack.segments
    units = units_of_all(segment, blocks)
    groups = [0] * len(leaves)
    # What the embedding shares with the head is the embedding's.
    parts = [*enumerate(units), (len(units) + 1, head), (len(units), embed)]
    for group, part in parts:
        for position in jax.tree.leaves(part):
            groups[position] = group
    return groups
