"""Views of saved arrays in the layout of a run, which read only wanted slices.

A checkpoint has the layout of the run that wrote it: master weights split or not,
feed-forwards in tiles, layers stacked or apart. Each view maps names and shapes of a
source to another layout, and views compose:

restacked(retiled(join_masters(source), num_tiles), names)
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping

import numpy as np

from zjax.checkpoint import layers
from zjax.checkpoint.layout import Entry
from zjax.optim.precision import join_bits

Index = tuple[slice, ...]
"""One slice with both bounds per dim."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Arrays that are read by name, slice by slice.

    Args:
        entries: Shape and dtype by name.
        read: Function that reads a slice of one array.
    """

    entries: Mapping[str, Entry]
    read: Callable[[str, Index], np.ndarray]

    def read_all(self, name: str) -> np.ndarray:
        """Reads a whole array."""
        return self.read(name, tuple(slice(0, n) for n in self.entries[name].shape))

    def subtree(self, part: str) -> "Source":
        """Returns the arrays under one path."""
        found = {n: e for n, e in self.entries.items() if n.startswith(f"{part}/")}
        return Source(found, self.read)


def cached(source: Source) -> Source:
    """Returns the arrays, each cached as a whole until another array is read."""
    # One array, as two may not fit host memory.
    read_all = functools.lru_cache(maxsize=1)(source.read_all)
    return Source(source.entries, lambda name, index: read_all(name)[(..., *index)])


def join_masters(source: Source) -> Source:
    """Joins split master weights to float32; bf16 parameters disappear."""
    found = layers.find_split_masters(source.entries)
    high_bits = {low: high for high, low in found.items()}

    def read(name: str, index: Index) -> np.ndarray:
        stored = source.read(name, index)
        if name not in high_bits:
            return stored
        return join_bits(source.read(high_bits[name], index), stored)

    return Source(layers.joined_entries(source.entries), read)


def retiled(
    source: Source, num_tiles: int, *, saved_tiles: int | None = None
) -> Source:
    """Returns the arrays with feed-forwards in `num_tiles` tiles (1: untiled)."""
    saved_tiles = (
        layers.count_tiles(source.entries) if saved_tiles is None else saved_tiles
    )
    entries = layers.retile(source.entries, num_tiles, saved_tiles)

    def read(name: str, index: Index) -> np.ndarray:
        if entries[name] == source.entries.get(name):
            return source.read(name, index)
        parts = layers.locate(name, index, entries[name].shape, num_tiles, saved_tiles)
        arrays = [source.read(*part) for part in parts]
        # A single part is returned without a copy.
        return (
            np.concatenate(arrays, layers.hidden_dim(name)) if arrays[1:] else arrays[0]
        )

    return Source(entries, read)


def restacked(source: Source, names: Collection[str]) -> Source:
    """Returns the arrays with layers stacked or apart, as in the wanted names."""

    def read(name: str, index: Index) -> np.ndarray:
        sources = layers.sources_of(name, source.entries)
        if sources == [name]:
            return source.read(name, index)
        if sources[0] == layers.stack_of(name):
            number = layers.number_of(name)
            return source.read(sources[0], (slice(number, number + 1), *index))[0]
        parts = [source.read(x, index[1:]) for x in sources[index[0]]]
        return np.stack(parts) if parts[1:] else parts[0][np.newaxis]

    return Source(layers.restack(names, source.entries), read)


def match_layout(
    source: Source, wanted: Mapping[str, Entry], *, saved_tiles: int | None = None
) -> Source:
    """Returns the arrays with the tiles and the stacking of a run."""
    names = layers.joined_entries(wanted)
    return restacked(
        retiled(source, layers.count_tiles(names), saved_tiles=saved_tiles), names
    )
