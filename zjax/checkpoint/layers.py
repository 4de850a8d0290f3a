"""Layers stacked in one array or stored apart; a checkpoint restores to either.

A run on devices stacks the layers of a model; an offloaded run stores each apart, under
the name of the stack and an index: `blocks/mlp/kernel[3]`.
"""

import itertools
import re
from collections.abc import Collection, Mapping

from zjax.checkpoint.layout import Entry

_LAYER = re.compile(r"(?P<stack>.+)\[\d+\]")


def restack(wanted: Collection[str], found: Mapping[str, Entry]) -> dict[str, Entry]:
    """The arrays of a checkpoint, with layers stacked or apart as wanted.

    Args:
        wanted: Names of the arrays of the plan.
        found: Arrays of the checkpoint, by name.

    Returns:
        The entries, those of layers renamed and reshaped.

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
            if first.shape[0] != sum(stack_of(other) == sources[0] for other in wanted):
                continue
            entries[name] = Entry(first.shape[1:], first.dtype)
        elif all(layer == first for layer in layers):
            entries[name] = Entry((len(layers), *first.shape), first.dtype)
        for source in sources:
            entries.pop(source, None)
    return entries


def sources_of(name: str, found: Mapping[str, Entry]) -> list[str]:
    """The arrays of a checkpoint that hold a wanted one.

    Args:
        name: Name in the plan.
        found: Arrays of the checkpoint.

    Returns:
        The array itself, its layers in order, or its stack; empty if none exists.

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
    """The name of the stack of a layer; empty for an array that is not a layer."""
    layer = _LAYER.fullmatch(name)
    return layer["stack"] if layer else ""


def number_of(name: str) -> int:
    """The index of a layer in its stack."""
    return int(name.rpartition("[")[2].removesuffix("]"))


def stack_all(found: Mapping[str, Entry]) -> dict[str, Entry]:
    """The arrays of a checkpoint if all layers were stacked.

    Example:
        >>> print(*stack_all(dict.fromkeys(["w[0]", "w[1]"], Entry((3,), "int8"))))
        w
    """
    return restack({stack_of(name) or name: None for name in found}, found)
