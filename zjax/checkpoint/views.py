"""Arrays of a file as a run has them: views that read what they show from others.

A run may store master weights split, feed-forwards in tiles and layers one by one, and
a file holds what its run stored. Each view shows the arrays of a source under other
names and in other shapes, and reads of the source what is asked for and no more. One
is the source of the next: a checkpoint restores, weights load and leave by

    by_layer(tiled(whole_masters(source), num_tiles), names)
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping

import numpy as np

from zjax.checkpoint import halves, layers, tiles
from zjax.checkpoint.layout import Entry
from zjax.optim.split_master import join_bits

Index = tuple[slice, ...]
"""A part of an array: for each dim a slice with both bounds."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Arrays that are read by name, a part at a time.

    Args:
        entries: What there is of each array, by name.
        read: Reads a part of one.
    """

    entries: Mapping[str, Entry]
    read: Callable[[str, Index], np.ndarray]

    def whole(self, name: str) -> np.ndarray:
        """Reads all of an array.

        Args:
            name: One of `entries`.

        Returns:
            The array.
        """
        return self.read(name, tuple(slice(0, n) for n in self.entries[name].shape))

    def inside(self, part: str) -> "Source":
        """The arrays of one tree.

        Args:
            part: Its path.

        Returns:
            The source without all others.
        """
        found = {n: e for n, e in self.entries.items() if n.startswith(f"{part}/")}
        return Source(found, self.read)


def cached(source: Source) -> Source:
    """The same arrays, each read whole, and kept until another is asked for.

    Args:
        source: One whose parts cost as much to read as the whole.

    Returns:
        A source to be read array by array.
    """
    whole = functools.lru_cache(maxsize=1)(source.whole)
    return Source(source.entries, lambda name, index: whole(name)[(..., *index)])


def whole_masters(source: Source) -> Source:
    """Split master weights joined with the parameters in use.

    Args:
        source: Its master weights may be split.

    Returns:
        The arrays without the parameters in use of which there are split weights.
    """
    found = halves.masters_of_halves(source.entries)
    uppers = {lower: upper for upper, lower in found.items()}

    def read(name: str, index: Index) -> np.ndarray:
        stored = source.read(name, index)
        if name not in uppers:
            return stored
        return join_bits(source.read(uppers[name], index), stored)

    return Source(halves.whole_entries(source.entries), read)


def tiled(source: Source, num_tiles: int, *, given: int | None = None) -> Source:
    """Feed-forwards in another number of tiles.

    Args:
        source: Has them whole or in tiles.
        num_tiles: How many tiles there are to be; 1 makes feed-forwards whole.
        given: How many the source has; told by its names if None.

    Returns:
        The arrays renamed and reshaped; those that do not divide as they are.
    """
    given = tiles.num_tiles(source.entries) if given is None else given
    entries = tiles.as_tiled(source.entries, num_tiles, given)

    def read(name: str, index: Index) -> np.ndarray:
        if entries[name] == source.entries.get(name):
            return source.read(name, index)
        parts = tiles.parts_of(name, index, entries[name].shape, num_tiles, given)
        arrays = [source.read(*part) for part in parts]
        return (
            np.concatenate(arrays, tiles.hidden_dim(name)) if arrays[1:] else arrays[0]
        )

    return Source(entries, read)


def by_layer(source: Source, names: Collection[str]) -> Source:
    """Layers stacked or apart, as others have them.

    Args:
        source: Has them in either form.
        names: Of the arrays that are wanted.

    Returns:
        The arrays renamed and reshaped; those that fit no name as they are.
    """

    def read(name: str, index: Index) -> np.ndarray:
        sources = layers.sources_of(name, source.entries)
        if sources == [name]:
            return source.read(name, index)
        if sources[0] == layers.stack_of(name):
            number = layers.number_of(name)
            return source.read(sources[0], (slice(number, number + 1), *index))[0]
        return np.stack([source.read(x, index[1:]) for x in sources[index[0]]])

    return Source(layers.as_wanted(names, source.entries), read)


def as_wanted(
    source: Source, wanted: Mapping[str, Entry], *, given: int | None = None
) -> Source:
    """The arrays of a file as a run has them.

    Args:
        source: Its master weights are whole.
        wanted: Arrays of the run, whose master weights may be split.
        given: Tiles of each feed-forward of the source; told by its names if None.

    Returns:
        As many tiles, and layers stacked or apart, as in the run.
    """
    names = halves.whole_entries(wanted)
    return by_layer(tiled(source, tiles.num_tiles(names), given=given), names)
