"""Averaged weights (EMA, schedule-free) of a checkpoint; see `zjax.train.average`."""

import functools
import re
from collections.abc import Callable, Collection

import numpy as np

from zjax.checkpoint import adapters
from zjax.checkpoint.quantized import without_codes
from zjax.checkpoint.store import Store
from zjax.checkpoint.views import Index, Source
from zjax.config.load import load_config
from zjax.train.average import Part, choose_part

_SCHEDULE_FREE = re.compile(r"(?P<state>opt_state(/.+)?)/max_lr")
"""Matches the `max_lr` of a `ScheduleFreeState`; `b1` and `z` share the prefix."""


def saved_parts(names: Collection[str]) -> tuple[Part, ...]:
    """Kinds of weights that a checkpoint holds, the best for evaluation first.

    Example:
        >>> saved_parts(["master/w", "ema/w", "step"])
        ('ema', 'raw')
    """
    ema: tuple[Part, ...] = ("ema",) if any(n.startswith("ema/") for n in names) else ()
    free: tuple[Part, ...] = ("schedule_free",) if _states(names) else ()
    return (*ema, *free, "raw")


def open_weights(
    store: Store,
    part: str = "auto",
    step: int | None = None,
    *,
    merges_adapters: bool = True,
) -> tuple[Source, Part]:
    """Opens weights by path in the model, and returns the chosen kind as well."""
    step = store.latest() if step is None else step  # fixed: newer ones may appear
    saved = store.entries(step)
    chosen = choose_part(part, saved_parts(saved))
    # EMA skips frozen parameters, which are taken from `master`.
    trees = ("master/", "ema/") if chosen == "ema" else ("master/",)
    names = {n.removeprefix(t): n for t in trees for n in saved if n.startswith(t)}
    read_array = functools.partial(store.read_array, step=step)
    if chosen == "schedule_free":
        read_array = functools.partial(read_average, saved, read_array)

    def read(name: str, index: Index) -> np.ndarray:
        return read_array(names[name])[(..., *index)]

    source = Source({path: saved[name] for path, name in names.items()}, read)
    if not merges_adapters:
        return source, chosen
    lora = load_config(store.extra(step).get("config", {})).lora
    whole = without_codes(source)
    return adapters.merged(whole, lora) if lora else whole, chosen


def read_average(
    names: Collection[str], read_array: Callable[[str], np.ndarray], name: str
) -> np.ndarray:
    """Reads a parameter as `optax.contrib.schedule_free_eval_params` computes it."""
    y = read_array(name)
    for state in _states(names):
        z_name = f"{state}/z/{name.removeprefix('master/')}"
        if z_name in names:
            b1 = np.asarray(read_array(f"{state}/b1"), np.float32)
            z = read_array(z_name).astype(np.float32)
            return ((y.astype(np.float32) - (1 - b1) * z) / b1).astype(y.dtype)
    return y


def _states(names: Collection[str]) -> list[str]:
    """Tree paths of the schedule-free states among the names of saved arrays."""
    found = (_SCHEDULE_FREE.fullmatch(name) for name in names)
    states = [match["state"] for match in found if match]
    return [state for state in states if f"{state}/b1" in names]
