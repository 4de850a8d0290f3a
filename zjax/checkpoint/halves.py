"""Master weights whole, or in halves: a checkpoint restores to either.

A run whose master weights lack the half that is in use saves the lower half under the
name of the weights, and the parameters in use beside it.
"""

from collections.abc import Mapping

from zjax.checkpoint.layout import Entry

_MASTER, _PARAMS = "master/", "params/"
_HALVES = ("int16", "bfloat16")


def masters_of_halves(found: Mapping[str, Entry]) -> dict[str, str]:
    """Finds the parameters in use that are upper halves of master weights.

    Args:
        found: Arrays by name.

    Returns:
        The name of the master weights, by that of their upper half.

    Example:
        >>> lower, upper = Entry((3,), "int16"), Entry((3,), "bfloat16")
        >>> halves = {"master/w": lower, "params/w": upper}
        >>> masters_of_halves(halves)
        {'params/w': 'master/w'}
    """
    names = (name for name in found if name.startswith(_MASTER))
    pairs = ((_PARAMS + name.removeprefix(_MASTER), name) for name in names)
    return {
        upper: lower
        for upper, lower in pairs
        if upper in found
        and (found[lower].dtype, found[upper].dtype) == _HALVES
        and found[lower].shape == found[upper].shape
    }


def whole_entries(found: Mapping[str, Entry]) -> dict[str, Entry]:
    """What a file would say if all master weights were whole.

    Args:
        found: Arrays by name.

    Returns:
        Entries by name.

    Example:
        >>> lower, upper = Entry((3,), "int16"), Entry((3,), "bfloat16")
        >>> halves = {"master/w": lower, "params/w": upper}
        >>> {name: str(entry) for name, entry in whole_entries(halves).items()}
        {'master/w': 'float32[3]'}
    """
    masters = masters_of_halves(found)
    whole = {name: Entry(found[name].shape, "float32") for name in masters.values()}
    return {name: x for name, x in (dict(found) | whole).items() if name not in masters}
