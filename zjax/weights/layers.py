"""Views of stacked layers, split master weights and tiles of checkpoints."""

import dataclasses
import itertools
import re
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from zjax.optim.precision import join_bits
from zjax.weights.source import Entry, Index, Source


def join_masters(source: Source) -> Source:
    """Joins split master weights to float32; bf16 parameters disappear."""
    found = find_split_masters(source.entries)
    high_bits = {low: high for high, low in found.items()}

    def read(name: str, index: Index) -> np.ndarray:
        low = source.read(name, index)
        return join_bits(source.read(high_bits[name], index), low)

    joined = joined_entries(source.entries)
    masters = Source({low: joined[low] for low in high_bits}, read)
    return source.without(found).joined(masters)


def retiled(
    source: Source, num_tiles: int, *, saved_tiles: int | None = None
) -> Source:
    """Returns the arrays with feed-forwards in `num_tiles` tiles (1: untiled)."""
    saved_tiles = count_tiles(source.entries) if saved_tiles is None else saved_tiles
    entries = retile(source.entries, num_tiles, saved_tiles)

    def read(name: str, index: Index) -> np.ndarray:
        if entries[name] == source.entries.get(name):
            return source.read(name, index)
        parts = locate(name, index, entries[name].shape, num_tiles, saved_tiles)
        arrays = [source.read(*part) for part in parts]
        # A single part is returned without a copy.
        return np.concatenate(arrays, hidden_dim(name)) if arrays[1:] else arrays[0]

    return Source(entries, read)


def restacked(source: Source, names: Collection[str]) -> Source:
    """Returns the arrays with layers stacked or apart, as in the wanted names."""

    def read(name: str, index: Index) -> np.ndarray:
        sources = sources_of(name, source.entries)
        if sources == [name]:
            return source.read(name, index)
        if sources[0] == stack_of(name):
            number = number_of(name)
            return source.read(sources[0], (slice(number, number + 1), *index))[0]
        parts = [source.read(x, index[1:]) for x in sources[index[0]]]
        return np.stack(parts) if parts[1:] else parts[0][np.newaxis]

    return Source(restack(names, source.entries), read)


def match_layout(
    source: Source, wanted: Mapping[str, Entry], *, saved_tiles: int | None = None
) -> Source:
    """Returns the arrays with the tiles and the stacking of a run."""
    names = joined_entries(wanted)
    return restacked(
        retiled(source, count_tiles(names), saved_tiles=saved_tiles), names
    )


_LAYER = re.compile(r"(?P<stack>.+)\[\d+\]")


def restack(wanted: Collection[str], found: Mapping[str, Entry]) -> dict[str, Entry]:
    """Returns entries with layers stacked or apart, as in the wanted names.

    Example:
        >>> found = restack(["w[0]", "w[1]"], {"w": Entry((2, 3), "float32")})
        >>> {name: str(entry) for name, entry in found.items()}
        {'w[0]': 'float32[3]', 'w[1]': 'float32[3]'}
    """
    entries = dict(found)
    for name in wanted:
        sources = sources_of(name, found)
        if sources in ([], [name]):
            continue
        first = found[sources[0]]
        layers = [found[source] for source in sources]
        if sources[0] == stack_of(name):
            # A stack of another depth stays, and the check of names reports the array.
            if first.shape[0] != sum(stack_of(other) == sources[0] for other in wanted):
                continue
            entries[name] = Entry(first.shape[1:], first.dtype)
        elif all(layer == first for layer in layers):
            entries[name] = Entry((len(layers), *first.shape), first.dtype)
        for source in sources:
            entries.pop(source, None)
    return entries


def sources_of(name: str, found: Mapping[str, Entry]) -> list[str]:
    """Names of saved arrays that hold a wanted array, layers in order; empty if none.

    Example:
        >>> layer = Entry((3,), "float32")
        >>> sources_of("w", {"w[0]": layer, "w[1]": layer})
        ['w[0]', 'w[1]']
    """
    if name in found:
        return [name]
    layers = (f"{name}[{number}]" for number in itertools.count())
    apart = list(itertools.takewhile(found.__contains__, layers))
    return apart or [stack for stack in [stack_of(name)] if stack in found]


def stack_of(name: str) -> str:
    """Name of a layer's stack; empty for an array that is not a layer."""
    layer = _LAYER.fullmatch(name)
    return layer["stack"] if layer else ""


def number_of(name: str) -> int:
    """Index of a layer in the stack."""
    return int(name.rpartition("[")[2].removesuffix("]"))


def stack_all(found: Mapping[str, Entry]) -> dict[str, Entry]:
    """Returns the entries of a checkpoint as if all layers were stacked.

    Example:
        >>> print(*stack_all(dict.fromkeys(["w[0]", "w[1]"], Entry((3,), "int8"))))
        w
    """
    return restack({stack_of(name) or name: None for name in found}, found)


_MASTER, _PARAMS = "master/", "params/"
_SPLIT_DTYPES = ("int16", "bfloat16")
"""Dtypes of the low and the high 16 bits of a float32 master weight."""


def find_split_masters(entries: Mapping[str, Entry]) -> dict[str, str]:
    """Names of split master weights (low bits), by name of the parameter (high bits).

    Example:
        >>> low, high = Entry((3,), "int16"), Entry((3,), "bfloat16")
        >>> find_split_masters({"master/w": low, "params/w": high})
        {'params/w': 'master/w'}
    """
    names = (name for name in entries if name.startswith(_MASTER))
    pairs = ((_PARAMS + name.removeprefix(_MASTER), name) for name in names)
    return {
        high: low
        for high, low in pairs
        if high in entries
        and (entries[low].dtype, entries[high].dtype) == _SPLIT_DTYPES
        and entries[low].shape == entries[high].shape
    }


def joined_entries(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Returns entries with split master weights joined to float32.

    Example:
        >>> low, high = Entry((3,), "int16"), Entry((3,), "bfloat16")
        >>> joined = joined_entries({"master/w": low, "params/w": high})
        >>> {name: str(entry) for name, entry in joined.items()}
        {'master/w': 'float32[3]'}
    """
    masters = find_split_masters(entries)
    joined = {name: Entry(entries[name].shape, "float32") for name in masters.values()}
    return {
        name: x for name, x in (dict(entries) | joined).items() if name not in masters
    }


_HIDDEN_DIMS = {"up": -1, "gate": -1, "down": -2}
"""Hidden dim of each kernel, counted from the end, as stacked layers come in front."""
_TILE = re.compile(
    r"(?P<start>.*\bmlp)(?P<tile>[/.]tiles[/.](?P<number>\d+))(?P<end>.*)"
)
_ARRAY = re.compile(
    r"(?P<start>.*\bmlp)"
    r"(?P<end>(?P<sep>[/.])(?P<matrix>up|gate|down)[/.](?P<kind>kernel|bias)\b.*)"
)


def count_tiles(names: Iterable[str]) -> int:
    """Number of tiles of a feed-forward, from names of arrays; 1 if untiled.

    Example:
        >>> count_tiles(["mlp/tiles/1/up/kernel", "mlp/tiles/0/up/kernel"])
        2
    """
    found = filter(None, map(_TILE.fullmatch, names))
    return max((int(tile["number"]) for tile in found), default=0) + 1


def untiled_name(name: str) -> tuple[str, int]:
    """Splits a name into the untiled name and the tile's index (0 if untiled).

    Example:
        >>> untiled_name("blocks/mlp/tiles/3/up/kernel[7]")
        ('blocks/mlp/up/kernel[7]', 3)
    """
    tile = _TILE.fullmatch(name)
    return (tile["start"] + tile["end"], int(tile["number"])) if tile else (name, 0)


def retile(
    found: Mapping[str, Entry], num_tiles: int, saved_tiles: int
) -> dict[str, Entry]:
    """Returns entries with feed-forwards, if divisible, in `num_tiles` tiles (1: none).

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
        if dim is None or len(entry.shape) < -dim:  # e.g. factored state
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
    """Finds saved tiles and slices that concatenate, by hidden dim, to a slice.

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
    """Name of one tile of an untiled array; `untiled` itself if there is one tile.

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
    """Hidden dim of an array, counted from the end; None without a hidden dim.

    Example:
        >>> hidden_dim("blocks/mlp/tiles/3/down/kernel")
        -2
    """
    part = _ARRAY.fullmatch(untiled_name(name)[0])
    if part is None:
        return None
    if part["kind"] == "bias":
        # The bias of `down` has the width of the model.
        return None if part["matrix"] == "down" else -1
    return _HIDDEN_DIMS[part["matrix"]]


def _resized(entry: Entry, dim: int, times: int, parts: int) -> Entry:
    """Returns an entry with one dim of `times / parts` the size."""
    shape = list(entry.shape)
    shape[dim] = shape[dim] * times // parts
    return dataclasses.replace(entry, shape=tuple(shape))
