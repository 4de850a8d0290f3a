"""Feed-forwards with or without tiles; a checkpoint restores to any number.

A model with `mlp_tiles` names the arrays of a tile `blocks/mlp/tiles/3/up/kernel`; one
without names the array `blocks/mlp/up/kernel`. Tiles concatenate along the hidden dim.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping

from zjax.checkpoint.layout import Entry

_HIDDEN_DIMS = {"up": -1, "gate": -1, "down": -2}
"""The hidden dim of each kernel, counted from the end."""
_TILE = re.compile(
    r"(?P<start>.*\bmlp)(?P<tile>[/.]tiles[/.](?P<number>\d+))(?P<end>.*)"
)
_ARRAY = re.compile(
    r"(?P<start>.*\bmlp)"
    r"(?P<end>(?P<sep>[/.])(?P<matrix>up|gate|down)[/.](?P<kind>kernel|bias)\b.*)"
)


def count_tiles(names: Iterable[str]) -> int:
    """Number of tiles of each feed-forward, from the names of a model's arrays.

    Example:
        >>> count_tiles(["mlp/tiles/1/up/kernel", "mlp/tiles/0/up/kernel"])
        2
    """
    found = filter(None, map(_TILE.fullmatch, names))
    return max((int(tile["number"]) for tile in found), default=0) + 1


def untiled_name(name: str) -> tuple[str, int]:
    """Name of the untiled array and index of the tile; 0 for an untiled array.

    Example:
        >>> untiled_name("blocks/mlp/tiles/3/up/kernel[7]")
        ('blocks/mlp/up/kernel[7]', 3)
    """
    tile = _TILE.fullmatch(name)
    return (tile["start"] + tile["end"], int(tile["number"])) if tile else (name, 0)


def retile(
    found: Mapping[str, Entry], num_tiles: int, saved_tiles: int
) -> dict[str, Entry]:
    """The arrays of a checkpoint in another number of tiles.

    Args:
        found: Arrays of the checkpoint, by name.
        num_tiles: Number of tiles wanted; 1 for untiled feed-forwards.
        saved_tiles: Number of tiles in the checkpoint.

    Returns:
        Entries, renamed and reshaped; arrays that do not divide stay untiled.

    Example:
        >>> found = {"mlp/up/kernel": Entry((2, 6), "int8")}
        >>> {name: str(entry) for name, entry in retile(found, 2, 1).items()}
        {'mlp/tiles/0/up/kernel': 'int8[2,3]', 'mlp/tiles/1/up/kernel': 'int8[2,3]'}
    """
    if num_tiles == saved_tiles:
        return dict(found)
    entries = dict[str, Entry]()
    for name, entry in found.items():
        untiled, _ = untiled_name(name)
        dim = hidden_dim(untiled)
        if dim is None or len(entry.shape) < -dim:  # reduced optimizer state, maybe
            entries[name] = entry
            continue
        joined = _resized(entry, dim, saved_tiles, 1)
        if joined.shape[dim] % num_tiles:
            entries[untiled] = joined
            continue
        names = [tile_name(untiled, number, num_tiles) for number in range(num_tiles)]
        entries |= dict.fromkeys(names, _resized(joined, dim, 1, num_tiles))
    return entries


def locate(
    name: str,
    index: tuple[slice, ...],
    shape: tuple[int, ...],
    num_tiles: int,
    saved_tiles: int,
) -> list[tuple[str, tuple[slice, ...]]]:
    """Where a slice of an array lies in the saved tiles.

    Args:
        name: Name of the array, a tile or untiled.
        index: The slice, with bounds.
        shape: Shape of the array.
        num_tiles: Number of tiles that the array belongs to.
        saved_tiles: Number of tiles in the checkpoint.

    Returns:
        Names and slices, which concatenate to the slice along the hidden dim.

    Example:
        >>> index = slice(0, 2), slice(1, 3)
        >>> locate("mlp/tiles/2/up/kernel", index, (2, 4), 3, 1)
        [('mlp/up/kernel', (slice(0, 2, None), slice(9, 11, None)))]
    """
    untiled, number = untiled_name(name)
    dim = hidden_dim(name)
    assert dim is not None
    size, before = shape[dim] * num_tiles // saved_tiles, number * shape[dim]
    start, stop = before + index[dim].start, before + index[dim].stop
    parts = []
    for tile in range(start // size, -(-stop // size)):
        slices, first = list(index), tile * size
        slices[dim] = slice(max(start - first, 0), min(stop - first, size))
        parts.append((tile_name(untiled, tile, saved_tiles), tuple(slices)))
    return parts


def tile_name(untiled: str, number: int, num_tiles: int) -> str:
    """The name of one tile of an untiled array; `untiled` itself if there is only one.

    Example:
        >>> tile_name("blocks/mlp/up/kernel[7]", 3, 4)
        'blocks/mlp/tiles/3/up/kernel[7]'
    """
    part = _ARRAY.fullmatch(untiled)
    assert part is not None
    sep = part["sep"]
    tile = f"{sep}tiles{sep}{number}" if num_tiles > 1 else ""
    return f"{part['start']}{tile}{part['end']}"


def hidden_dim(name: str) -> int | None:
    """The hidden dim of an array, counted from the end; None if it has none.

    Example:
        >>> hidden_dim("blocks/mlp/tiles/3/down/kernel")
        -2
    """
    part = _ARRAY.fullmatch(untiled_name(name)[0])
    if part is None:
        return None
    if part["kind"] == "bias":
        return None if part["matrix"] == "down" else -1
    return _HIDDEN_DIMS[part["matrix"]]


def _resized(entry: Entry, dim: int, times: int, parts: int) -> Entry:
    shape = list(entry.shape)
    shape[dim] = shape[dim] * times // parts
    return dataclasses.replace(entry, shape=tuple(shape))
