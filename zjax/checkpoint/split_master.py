"""Split master weights in checkpoints; split and float32 ones restore into each other.

A run with split master weights saves their low 16 bits as `master/...` and the bf16
parameters, which are the high bits, as `params/...`.
"""

from collections.abc import Mapping

from zjax.checkpoint.layout import Entry

_MASTER, _PARAMS = "master/", "params/"
_SPLIT_DTYPES = ("int16", "bfloat16")


def find_split_masters(entries: Mapping[str, Entry]) -> dict[str, str]:
    """Names of split master weights, by the name of their bf16 parameters.

    Args:
        entries: Arrays of a checkpoint or of a run, by name.

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
    """The arrays of a checkpoint if split master weights were joined to float32.

    Args:
        entries: Arrays of a checkpoint or of a run, by name.

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
