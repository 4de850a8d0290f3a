"""Tiles of rows, none of which belongs to two groups."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """Where each tile begins, and how many of its rows belong to its group.

    Args:
        group: int32[tiles], of each tile.
        start: int32[tiles], its first row.
        rows: int32[tiles], 0 for tiles that no group needs.
    """

    group: Array
    start: Array
    rows: Array


def make_tiles(sizes: Array, num_rows: int, tile_rows: int) -> Tiles:
    """Divides groups of adjacent rows into tiles.

    Args:
        sizes: int32[groups], rows of each group; they follow one another from row 0.
        num_rows: At least the sum of `sizes`.
        tile_rows: Most rows of a tile, 1 or more.

    Returns:
        As many tiles as any sizes need.

    Example:
        >>> tiles = make_tiles(jnp.array([3, 0, 2]), num_rows=5, tile_rows=2)
        >>> [x.tolist() for x in (tiles.group, tiles.start, tiles.rows)]
        [[0, 0, 2, 2, 2, 2], [0, 2, 3, 5, 5, 5], [2, 1, 2, 0, 0, 0]]
    """
    number = -(-num_rows // tile_rows) + sizes.size
    ends, last = jnp.cumsum(sizes), sizes.size - 1
    tile_ends = jnp.cumsum(-(-sizes // tile_rows))
    tile = jnp.arange(number, dtype=jnp.int32)
    # As one comparison of all pairs: a search would be a loop of small kernels.
    group = jnp.searchsorted(tile_ends, tile, side="right", method="compare_all")
    group = jnp.minimum(group, last)
    first_tile = jnp.where(group > 0, tile_ends[group - 1], 0)
    start = ends[group] - sizes[group] + (tile - first_tile) * tile_rows
    start = jnp.minimum(start, ends[group])
    return Tiles(group, start, jnp.minimum(ends[group] - start, tile_rows))
