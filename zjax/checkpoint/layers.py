"""Layers stacked in one array, or one by one: a checkpoint restores to either.

A run that keeps its state on the devices stacks the layers of a model; one that moves
it stores each by itself, named as a part of the stack: `blocks/mlp/kernel[3]`.
"""

import itertools
import re
from collections.abc import Collection, Mapping

from zjax.checkpoint.layout import Entry

_LAYER = re.compile(r"(?P<stack>.+)\[\d+\]")


def as_wanted(wanted: Collection[str], found: Mapping[str, Entry]) -> dict[str, Entry]:
    """What a file says, with layers stacked or apart as the plan has them.

    Args:
        wanted: Names of the arrays of the plan.
        found: Arrays of the file, by name.

    Returns:
        Entries of the file, those of layers renamed and reshaped.

    Example:
        >>> found = as_wanted(["w[0]", "w[1]"], {"w": Entry((2, 3), "float32")})
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
            if first.shape[0] != sum(stack_of(other) == sources[0] for other in wanted):
                continue
            entries[name] = Entry(first.shape[1:], first.dtype)
        elif all(layer == first for layer in layers):
            entries[name] = Entry((len(layers), *first.shape), first.dtype)
        for source in sources:
            entries.pop(source, None)
    return entries


def sources_of(name: str, found: Mapping[str, Entry]) -> list[str]:
    """The arrays of a file that hold one of the plan.

    Args:
        name: As the plan has it.
        found: Arrays of the file.

    Returns:
        Itself, its layers in order, or its stack; nothing where none of them is there.

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
    """The array that would stack a layer.

    Args:
        name: Of an array.

    Returns:
        Its name; empty for what is no layer.
    """
    layer = _LAYER.fullmatch(name)
    return layer["stack"] if layer else ""


def number_of(name: str) -> int:
    """The number of a layer in its stack.

    Args:
        name: Of a layer.

    Returns:
        From 0 on.
    """
    return int(name.rpartition("[")[2].removesuffix("]"))


def together(found: Mapping[str, Entry]) -> dict[str, Entry]:
    """What a file would say if its layers were stacked.

    Args:
        found: Arrays of the file, by name.

    Returns:
        Entries by name.

    Example:
        >>> print(*together(dict.fromkeys(["w[0]", "w[1]"], Entry((3,), "int8"))))
        w
    """
    return as_wanted({stack_of(name) or name: None for name in found}, found)
