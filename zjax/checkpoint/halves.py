"""Master weights whole, or in halves: a checkpoint restores to either.

A run whose master weights lack the half that is in use saves the lower half under the
name of the weights, and the parameters in use beside it.
"""

from collections.abc import Mapping

from zjax.checkpoint.layout import Entry
from zjax.sharding.placement import Row

_MASTER, _PARAMS = "master/", "params/"


def master_of(name: str) -> str:
    """The master weights of which an array is the upper half.

    Args:
        name: Of any array of a state.

    Returns:
        Their name; `name` itself for all other arrays.

    Example:
        >>> master_of("params/embedding/tokens"), master_of("opt_state/0/count")
        ('master/embedding/tokens', 'opt_state/0/count')
    """
    is_upper = name.startswith(_PARAMS)
    return _MASTER + name.removeprefix(_PARAMS) if is_upper else name


def upper_of(name: str) -> str:
    """The upper half of master weights that are not whole.

    Args:
        name: Of any array of a state.

    Returns:
        The name of the parameters in use; empty for what are no master weights.
    """
    is_master = name.startswith(_MASTER)
    return _PARAMS + name.removeprefix(_MASTER) if is_master else ""


def whole_entries(found: Mapping[str, Entry]) -> dict[str, Entry]:
    """What a file would say if all master weights were whole.

    Args:
        found: Arrays of the file, by name.

    Returns:
        Entries by name.

    Example:
        >>> halves = {"master/w": Entry((3,), "int16"), "params/w": Entry((3,), "any")}
        >>> {name: str(entry) for name, entry in whole_entries(halves).items()}
        {'master/w': 'float32[3]'}
    """
    return {
        name: Entry(entry.shape, "float32") if upper_of(name) in found else entry
        for name, entry in found.items()
        if master_of(name) == name
    }


def whole_rows(named: Mapping[str, Row]) -> dict[str, Row]:
    """The places that a plan would have if all master weights were whole.

    Args:
        named: Places by name.

    Returns:
        Places by name.
    """
    return {n: row.whole for n, row in named.items() if master_of(n) == n}
