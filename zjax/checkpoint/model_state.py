"""Averaged weights of a checkpoint, and model state besides parameters."""

import functools
import pathlib
import re
from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np
from absl import logging

from zjax.checkpoint import adapters, layout
from zjax.checkpoint.adapters import without_codes
from zjax.checkpoint.layers import Index, Source
from zjax.checkpoint.saved import place_slices
from zjax.checkpoint.steps import find_steps
from zjax.checkpoint.store import Store
from zjax.config.load import saved_config
from zjax.errors import CheckpointError
from zjax.files import local_path
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
    lora = saved_config(store.extra(step)).lora
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


_TREE = "model_state"
_NUM_SHOWN = 3


def load_model_state(path: str, initial: Any, plans: Any) -> Any:
    """Loads the model state that a run saved beside the weights.

    Random keys, and arrays that the source lacks, keep initial values. One warning
    names the statistics among the latter.
    """
    named = layout.name_leaves(plans, _TREE)
    wanted = {n: row for n, row in named.items() if not layout.is_key(row.dtype)}
    if not wanted:
        return initial
    place = pathlib.Path(local_path("checkpoint.init_from", path, CheckpointError))
    steps = find_steps(place)
    store = Store(str(steps)) if steps else None
    saved = store.entries() if store else {}
    expected = layout.describe_plans(wanted)
    held = {name: entry for name, entry in expected.items() if name in saved}
    statistics = [n for n, e in expected.items() if layout.is_floating(e.dtype)]
    missing = [name for name in statistics if name not in held]
    if missing and jax.process_index() == 0:
        _warn(path, missing)
    layout.check_same(held, {name: saved[name] for name in held}, path, cast=held)
    first = layout.name_leaves(initial, _TREE)
    arrays = [
        place_slices(store.read_array(name).__getitem__, named[name])
        if store and name in held
        else x
        for name, x in first.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(initial), arrays)


def _warn(path: str, missing: list[str]) -> None:
    """Warns of statistics that keep initial values."""
    names = ", ".join(name.removeprefix(f"{_TREE}/") for name in missing[:_NUM_SHOWN])
    more = len(missing) - _NUM_SHOWN
    names += f" and {more} more" if more > 0 else ""
    text = "checkpoint.init_from=%r holds no model state %s, which begins anew"
    logging.warning(text, path, names)
