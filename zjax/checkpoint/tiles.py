"""Feed-forwards whole or in tiles: a checkpoint restores to any number of them.

A model with `mlp_tiles` names the arrays of a tile `blocks/mlp/tiles/3/up/kernel` where
one without them has `blocks/mlp/up/kernel`; side by side along the hidden channels, the
tiles are the whole.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping

from zjax.checkpoint.layout import Entry

_ARRAYS = {"up": -1, "gate": -1, "down": -2}
"""The dim of the hidden channels, counted from the end, of each kernel of a tile."""
_TILE = re.compile(
    r"(?P<start>.*\bmlp)(?P<tile>[/.]tiles[/.](?P<number>\d+))(?P<end>.*)"
)
_PART = re.compile(
    r"(?P<start>.*\bmlp)"
    r"(?P<end>(?P<sep>[/.])(?P<matrix>up|gate|down)[/.](?P<kind>kernel|bias)\b.*)"
)


def num_tiles(names: Iterable[str]) -> int:
    """Tiles of each feed-forward.

    Args:
        names: Of the arrays of a model.

    Returns:
        1 where it is whole.

    Example:
        >>> num_tiles(["blocks/mlp/tiles/1/up/kernel", "blocks/mlp/tiles/0/up/kernel"])
        2
    """
    tiles = filter(None, map(_TILE.fullmatch, names))
    return max((int(tile["number"]) for tile in tiles), default=0) + 1


def whole_of(name: str) -> tuple[str, int]:
    """The array of which one is a tile.

    Args:
        name: Of any array.

    Returns:
        Its name, and the number of the tile; itself and 0 for what is no tile.

    Example:
        >>> whole_of("blocks/mlp/tiles/3/up/kernel[7]")
        ('blocks/mlp/up/kernel[7]', 3)
    """
    tile = _TILE.fullmatch(name)
    return (tile["start"] + tile["end"], int(tile["number"])) if tile else (name, 0)


def as_tiled(found: Mapping[str, Entry], tiles: int, given: int) -> dict[str, Entry]:
    """What a file says, with as many tiles as are wanted.

    Args:
        found: Arrays of the file, by name.
        tiles: How many tiles there are to be; 1 makes feed-forwards whole.
        given: How many there are.

    Returns:
        Entries of the file, renamed and reshaped; those that do not divide as they are.

    Example:
        >>> found = {"mlp/up/kernel": Entry((2, 6), "int8")}
        >>> {name: str(entry) for name, entry in as_tiled(found, 2, 1).items()}
        {'mlp/tiles/0/up/kernel': 'int8[2,3]', 'mlp/tiles/1/up/kernel': 'int8[2,3]'}
    """
    if tiles == given:
        return dict(found)
    entries = dict[str, Entry]()
    for name, entry in found.items():
        whole, _ = whole_of(name)
        dim = hidden_dim(whole)
        if dim is None or len(entry.shape) < -dim:  # the optimizer's own, maybe
            entries[name] = entry
            continue
        joined = _resized(entry, dim, given, 1)
        if joined.shape[dim] % tiles:
            entries[whole] = joined
            continue
        names = [tile_of(whole, number, tiles) for number in range(tiles)]
        entries |= dict.fromkeys(names, _resized(joined, dim, 1, tiles))
    return entries


def parts_of(
    name: str, index: tuple[slice, ...], shape: tuple[int, ...], tiles: int, given: int
) -> list[tuple[str, tuple[slice, ...]]]:
    """Where a part of an array lies in the tiles that there are.

    Args:
        name: Of the array, whole or a tile.
        index: The part, with bounds.
        shape: Of the array.
        tiles: Into how many the array of which it is one is cut.
        given: Into how many it is cut where it is read.

    Returns:
        Names and parts, which make up the part along the hidden channels.

    Example:
        >>> index = slice(0, 2), slice(1, 3)
        >>> parts_of("mlp/tiles/2/up/kernel", index, (2, 4), 3, 1)
        [('mlp/up/kernel', (slice(0, 2, None), slice(9, 11, None)))]
    """
    whole, number = whole_of(name)
    dim = hidden_dim(name)
    assert dim is not None
    size, before = shape[dim] * tiles // given, number * shape[dim]
    start, stop = before + index[dim].start, before + index[dim].stop
    parts = []
    for tile in range(start // size, -(-stop // size)):
        slices, first = list(index), tile * size
        slices[dim] = slice(max(start - first, 0), min(stop - first, size))
        parts.append((tile_of(whole, tile, given), tuple(slices)))
    return parts


def tile_of(whole: str, number: int, tiles: int) -> str:
    """The name of one of the tiles of an array.

    Args:
        whole: The array of a feed-forward without tiles.
        number: Which of them.
        tiles: How many there are.

    Returns:
        `whole` where that is all of it.

    Example:
        >>> tile_of("blocks/mlp/up/kernel[7]", 3, 4)
        'blocks/mlp/tiles/3/up/kernel[7]'
    """
    part = _PART.fullmatch(whole)
    assert part is not None
    sep = part["sep"]
    tile = f"{sep}tiles{sep}{number}" if tiles > 1 else ""
    return f"{part['start']}{tile}{part['end']}"


def hidden_dim(name: str) -> int | None:
    """The dim of the hidden channels of an array.

    Args:
        name: Of the array, whole or a tile.

    Returns:
        Counted from the end; None for arrays that tiles share.

    Example:
        >>> hidden_dim("blocks/mlp/tiles/3/down/kernel")
        -2
    """
    part = _PART.fullmatch(whole_of(name)[0])
    if part is None:
        return None
    if part["kind"] == "bias":
        return None if part["matrix"] == "down" else -1
    return _ARRAYS[part["matrix"]]


def _resized(entry: Entry, dim: int, times: int, parts: int) -> Entry:
    shape = list(entry.shape)
    shape[dim] = shape[dim] * times // parts
    return dataclasses.replace(entry, shape=tuple(shape))
