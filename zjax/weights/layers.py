"""Views of stacked layers, split master weights and tiles of checkpoints."""

import dataclasses
import itertools
import re
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from zjax.ops.weights import join_bits
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


def untiled(source: Source) -> Source:
    """Returns the arrays with the tiles of each feed-forward joined."""
    tiles, entries = dict[str, list[str]](), dict[str, Entry]()
    for name, entry in source.entries.items():
        whole, _ = untiled_name(name)
        if whole == name or not _is_tiled(whole, entry):
            entries[name] = entry
        else:
            tiles.setdefault(whole, []).append(name)
            entries[whole] = _resized(entry, whole, len(tiles[whole]), 1)

    def read(name: str, index: Index) -> np.ndarray:
        if name not in tiles:
            return source.read(name, index)
        names, dim = sorted(tiles[name], key=untiled_name), hidden_dim(name)
        size = entries[name].shape[dim] // len(names)
        parts = []
        for tile in range(index[dim].start // size, -(-index[dim].stop // size)):
            slices, first = list(index), tile * size
            stop = min(index[dim].stop - first, size)
            slices[dim] = slice(max(index[dim].start - first, 0), stop)
            parts.append(source.read(names[tile], tuple(slices)))
        # A single part is returned without a copy.
        return np.concatenate(parts, dim) if parts[1:] else parts[0]

    return Source(entries, read)


def tiled(source: Source, num_tiles: int) -> Source:
    """Returns untiled arrays with feed-forwards, if divisible, in tiles (1: none)."""
    entries = dict[str, Entry]()
    for name, entry in source.entries.items():
        is_tiled = num_tiles > 1 and _is_tiled(name, entry)
        if is_tiled and not entry.shape[hidden_dim(name)] % num_tiles:
            names = (tile_name(name, number) for number in range(num_tiles))
            entries |= dict.fromkeys(names, _resized(entry, name, 1, num_tiles))
        else:
            entries[name] = entry

    def read(name: str, index: Index) -> np.ndarray:
        if name in source.entries:
            return source.read(name, index)
        (whole, number), slices = untiled_name(name), list(index)
        dim = hidden_dim(whole)
        first = number * entries[name].shape[dim]
        slices[dim] = slice(first + index[dim].start, first + index[dim].stop)
        return source.read(whole, tuple(slices))

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


def match_layout(source: Source, wanted: Mapping[str, Entry]) -> Source:
    """Returns the arrays with the tiles and the stacking of a run."""
    names = joined_entries(wanted)
    return restacked(tiled(untiled(source), count_tiles(names)), names)


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
    """Names of saved arrays that hold a wanted array, layers in order; [] if none."""
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
    """Returns the entries of a checkpoint as if all layers were stacked."""
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
    """Returns entries with split master weights joined to float32."""
    masters = find_split_masters(entries)
    joined = {name: Entry(entries[name].shape, "float32") for name in masters.values()}
    return {
        name: x for name, x in (dict(entries) | joined).items() if name not in masters
    }


_HIDDEN_DIMS = {
    ("up", "kernel"): -1,
    ("gate", "kernel"): -1,
    ("down", "kernel"): -2,
    ("up", "bias"): -1,
    ("gate", "bias"): -1,
}
"""Hidden dim of each array, counted from the end, as stacked layers come in front."""
_TILE = re.compile(
    r"(?P<start>.*\bmlp)(?P<tile>[/.]tiles[/.](?P<number>\d+))(?P<end>.*)"
)
_ARRAY = re.compile(
    r"(?P<start>.*\bmlp)"
    r"(?P<end>(?P<sep>[/.])(?P<matrix>up|gate|down)[/.](?P<kind>kernel|bias)\b.*)"
)


def count_tiles(names: Iterable[str]) -> int:
    """Number of tiles of a feed-forward, from names of arrays; 1 if untiled."""
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


def tile_name(untiled: str, number: int) -> str:
    """Name of one tile of an untiled array."""
    part = _ARRAY.fullmatch(untiled)
    assert part is not None
    return "{start}{sep}tiles{sep}{number}{end}".format(
        **part.groupdict(), number=number
    )


def hidden_dim(untiled: str) -> int:
    """Hidden dim of an array, counted from the end; 0 without a hidden dim.

    Example:
        >>> hidden_dim("blocks/mlp/down/kernel")
        -2
    """
    part = _ARRAY.fullmatch(untiled)
    # The bias of `down` has the width of the model.
    return _HIDDEN_DIMS.get((part["matrix"], part["kind"]), 0) if part else 0


def _is_tiled(untiled: str, entry: Entry) -> bool:
    """Whether an array may have tiles; factored state may lack the hidden dim."""
    return 0 < -hidden_dim(untiled) <= len(entry.shape)


def _resized(entry: Entry, untiled: str, times: int, parts: int) -> Entry:
    """Returns an entry with a hidden dim of `times / parts` the size."""
    shape, dim = list(entry.shape), hidden_dim(untiled)
    shape[dim] = shape[dim] * times // parts
    return dataclasses.replace(entry, shape=tuple(shape))
