"""Layers stacked in one array, or one by one: a checkpoint restores to either.

A run that keeps its state on the devices stacks the layers of a model; one that moves
it stores each by itself, named by its number: `blocks/mlp/kernel/3`.
"""

import itertools
from collections.abc import Callable, Mapping

import numpy as np

from zjax.checkpoint.layout import Entry


def as_wanted(
    wanted: Mapping[str, Entry], found: Mapping[str, Entry]
) -> dict[str, Entry]:
    """What a file says, with layers stacked or apart as the plan has them.

    Args:
        wanted: Arrays of the plan, by name.
        found: Arrays of the file, by name.

    Returns:
        Entries of the file, those of layers renamed and reshaped.

    Example:
        >>> found = {"w": Entry((2, 3), "float32")}
        >>> print(*as_wanted({"w/0": found["w"], "w/1": found["w"]}, found).items())
        ('w/0', Entry(shape=(3,), dtype='float32', key_impl='')) \
('w/1', Entry(shape=(3,), dtype='float32', key_impl=''))
    """
    entries = dict(found)
    for name in wanted:
        if name in found:
            continue
        sources = sources_of(name, found)
        if not sources:
            continue
        first = found[sources[0]]
        layers = [found[source] for source in sources]
        if sources[0] == stack_of(name):
            if first.shape[0] != sum(stack_of(other) == sources[0] for other in wanted):
                continue
            entries[name] = Entry(first.shape[1:], first.dtype)
        elif all(layer == first for layer in layers):
            entries[name] = Entry((len(layers), *first.shape), first.dtype)
        for source in sources:
            entries.pop(source, None)
    return entries


def read(
    name: str,
    found: Mapping[str, Entry],
    read_whole: Callable[[str], np.ndarray],
) -> np.ndarray:
    """Reads an array whose layers are stored otherwise.

    Args:
        name: As the plan has it.
        found: Arrays of the file.
        read_whole: Reads one of them.

    Returns:
        The array.
    """
    sources = sources_of(name, found)
    if sources[0] == stack_of(name):
        return read_whole(sources[0])[int(name.rpartition("/")[2])]
    return np.stack([read_whole(source) for source in sources])


def sources_of(name: str, found: Mapping[str, Entry]) -> list[str]:
    """The arrays of a file that hold one of the plan: its layers, or its stack."""
    layers = (f"{name}/{number}" for number in itertools.count())
    apart = list(itertools.takewhile(found.__contains__, layers))
    return apart or [stack for stack in [stack_of(name)] if stack in found]


def stack_of(name: str) -> str:
    """The array that would stack a layer; empty for what is no layer."""
    stack, _, number = name.rpartition("/")
    return stack if number.isdigit() else ""
