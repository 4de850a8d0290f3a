"""Feed-forwards whole or in tiles: a checkpoint restores to any number of them.

A model with `mlp_tiles` names the arrays of a tile `blocks/mlp/tiles/3/up/kernel` where
one without them has `blocks/mlp/up/kernel`; side by side along the hidden channels, the
tiles are the whole.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping

import numpy as np

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


def as_tiled(found: Mapping[str, Entry], tiles: int) -> dict[str, Entry]:
    """What a file says, with as many tiles as are wanted.

    Args:
        found: Arrays of the file, by name.
        tiles: How many tiles there are to be; 1 makes feed-forwards whole.

    Returns:
        Entries of the file, renamed and reshaped; those that do not divide as they are.

    Example:
        >>> found = {"mlp/up/kernel": Entry((2, 6), "int8")}
        >>> {name: str(entry) for name, entry in as_tiled(found, 2).items()}
        {'mlp/tiles/0/up/kernel': 'int8[2,3]', 'mlp/tiles/1/up/kernel': 'int8[2,3]'}
    """
    given = num_tiles(found)
    if tiles == given:
        return dict(found)
    entries = dict[str, Entry]()
    for name, entry in found.items():
        whole, _ = whole_of(name)
        dim = _hidden_dim(whole)
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


def read_joined(
    whole: str, found: Mapping[str, Entry], read: Callable[[str], np.ndarray]
) -> np.ndarray:
    """Reads an array that a file may hold in tiles.

    Args:
        whole: As `whole_of` names it.
        found: Arrays of the file.
        read: Reads one of them.

    Returns:
        The array of which they are tiles, or the one of this name.
    """
    given, dim = num_tiles(found), _hidden_dim(whole)
    if given == 1 or dim is None:
        return read(whole)
    parts = [read(tile_of(whole, number, given)) for number in range(given)]
    return np.concatenate(parts, dim)


def part_of(
    name: str, tiles: int, read_whole: Callable[[str], np.ndarray]
) -> np.ndarray:
    """One of the tiles of an array, or the array.

    Args:
        name: Of either.
        tiles: How many there are.
        read_whole: Gives the array by the name of the whole.

    Returns:
        A view of what `read_whole` gives.
    """
    whole, number = whole_of(name)
    dim = _hidden_dim(whole)
    if whole == name or dim is None:
        return read_whole(whole)
    return np.split(read_whole(whole), tiles, dim)[number]


def in_whole(
    index: tuple[slice, ...], name: str, shape: tuple[int, ...]
) -> tuple[slice, ...]:
    """Where a part of a tile lies in the array of which it is a tile.

    Args:
        index: Of the part, with bounds.
        name: Of the tile.
        shape: Its shape.

    Returns:
        The slices of the whole.

    Example:
        >>> in_whole((slice(0, 2), slice(1, 3)), "mlp/tiles/2/up/kernel", (2, 4))
        (slice(0, 2, None), slice(9, 11, None))
    """
    whole, number = whole_of(name)
    dim, slices = _hidden_dim(whole), list(index)
    assert dim is not None
    start = number * shape[dim]
    slices[dim] = slice(start + slices[dim].start, start + slices[dim].stop)
    return tuple(slices)


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


def _hidden_dim(whole: str) -> int | None:
    """Counted from the end; None for arrays that tiles share."""
    part = _PART.fullmatch(whole)
    if part is None:
        return None
    if part["kind"] == "bias":
        return None if part["matrix"] == "down" else -1
    return _ARRAYS[part["matrix"]]


def _resized(entry: Entry, dim: int, times: int, parts: int) -> Entry:
    shape = list(entry.shape)
    shape[dim] = shape[dim] * times // parts
    return dataclasses.replace(entry, shape=tuple(shape))
