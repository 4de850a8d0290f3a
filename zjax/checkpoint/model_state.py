"""Loads model state besides parameters, such as BatchNorm statistics, from a run."""

import pathlib
from typing import Any

import jax
from absl import logging

from zjax.checkpoint import layout
from zjax.checkpoint.saved import place_slices
from zjax.checkpoint.steps import find_steps
from zjax.checkpoint.store import Store
from zjax.errors import CheckpointError
from zjax.files import local_path

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
