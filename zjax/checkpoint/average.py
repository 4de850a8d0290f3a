"""The averaged weights that a checkpoint holds; see `zjax.train.average`."""

import re
from collections.abc import Callable, Collection

import numpy as np

from zjax.train.average import Part

_SCHEDULE_FREE = re.compile(r"(?P<state>opt_state(/.+)?)/max_lr")
"""A scalar of `optax.contrib.ScheduleFreeState`, beside `b1` and the tree `z`."""


def parts_saved(names: Collection[str]) -> tuple[Part, ...]:
    """Lists the weights that a checkpoint holds, those of evaluation first.

    Args:
        names: Its arrays.

    Returns:
        Names, `raw` the last of them.

    Example:
        >>> parts_saved(["master/w", "ema/w", "step"])
        ('ema', 'raw')
    """
    ema: tuple[Part, ...] = ("ema",) if any(n.startswith("ema/") for n in names) else ()
    free: tuple[Part, ...] = ("schedule_free",) if _states(names) else ()
    return (*ema, *free, "raw")


def read_average(
    names: Collection[str], read_array: Callable[[str], np.ndarray], name: str
) -> np.ndarray:
    """Reads a parameter as `optax.contrib.schedule_free_eval_params` has it.

    Args:
        names: Arrays of the checkpoint.
        read_array: Reads one of them, whole.
        name: One of `master`.

    Returns:
        Its average, in its dtype; itself where the optimizer does not update it.
    """
    y = read_array(name)
    for state in _states(names):
        moved = f"{state}/z/{name.removeprefix('master/')}"
        if moved in names:
            b1 = np.asarray(read_array(f"{state}/b1"), np.float32)
            z = read_array(moved).astype(np.float32)
            return ((y.astype(np.float32) - (1 - b1) * z) / b1).astype(y.dtype)
    return y


def _states(names: Collection[str]) -> list[str]:
    found = (_SCHEDULE_FREE.fullmatch(name) for name in names)
    states = [match["state"] for match in found if match]
    return [state for state in states if f"{state}/b1" in names]
