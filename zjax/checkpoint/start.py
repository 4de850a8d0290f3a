"""Opens the weights that a run starts from: files of tensors, or another run."""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from absl import logging

from zjax.checkpoint.steps import find_steps
from zjax.checkpoint.store import Store
from zjax.config.load import saved_config
from zjax.errors import CheckpointError
from zjax.files import local_path
from zjax.models.build import make_model
from zjax.sharding.placement import ArrayPlan
from zjax.train.average import Part, choose_part
from zjax.typing import Model
from zjax.weights import adapters, gguf_file, layers
from zjax.weights import source as sources
from zjax.weights.codes import without_codes
from zjax.weights.config_json import CONFIG_NAME, model_settings
from zjax.weights.files import open_files, tensor_name
from zjax.weights.pieces import Read, place_pieces
from zjax.weights.rounded import rounded
from zjax.weights.saved import place_slices

Adapt = Callable[[sources.Source, Mapping[str, sources.Entry]], sources.Source]
"""Function of a source and the expected entries that renames or converts arrays."""


def unchanged(
    source: sources.Source, expected: Mapping[str, sources.Entry]
) -> sources.Source:
    """Returns the source as it is."""
    return source


def names_huggingface(run: str) -> bool:
    """Whether `--run` names a Hugging Face checkpoint instead of a run."""
    if not run:
        return False
    folder = pathlib.Path(local_path("run", run))
    if folder.suffix == gguf_file.ENDING:
        return True
    return (folder / CONFIG_NAME).is_file() and not (folder / "checkpoints").exists()


def settings_of_weights(directory: str) -> dict[str, Any]:
    """Settings of a run that starts from a Hugging Face checkpoint."""
    return {"checkpoint.init_from": directory, "model": model_settings(directory)}


def load_weights(
    path: str,
    plans: Any,
    adapt: Adapt = unchanged,
    source: sources.Source | None = None,
) -> Any:
    """Reads weights straight onto shards, in the structure and dtypes of `plans`.

    `path` names a safetensors file, a directory with one file or an index, or a run,
    which gives the newest weights for evaluation; an open `source` is read in its
    place. Tensor names are paths with dots.
    """
    wanted = _match(source or open_source(path), plans, path, adapt)
    # Large arrays first: meanwhile a thread draws small arrays that no checkpoint
    # holds, such as adapters.
    order = sorted(range(len(wanted)), key=lambda i: -wanted[i][1].device_bytes)
    placed = zip(order, place_pieces([wanted[i] for i in order]), strict=True)
    return jax.tree.unflatten(
        jax.tree.structure(plans),
        [x for _, x in sorted(placed, key=lambda pair: pair[0])],
    )


def iter_weights(path: str, plans: Any, adapt: Adapt = unchanged) -> Iterator[Any]:
    """Yields weights one by one, in the order of `plans`; see `load_weights`.

    Names and shapes are checked at the call, before the first array is asked for.
    """
    return place_weights(open_source(path), plans, path, adapt)


def place_weights(
    source: sources.Source, plans: Any, path: str, adapt: Adapt = unchanged
) -> Iterator[Any]:
    """Yields weights of an open source; `path` is for messages."""
    return place_pieces(_match(source, plans, path, adapt))


def _match(
    source: sources.Source, plans: Any, path: str, adapt: Adapt
) -> list[tuple[Read, ArrayPlan]]:
    """Returns a slice reader and the plan of each array, after a check of all names."""
    named = {tensor_name(name): r for name, r in sources.name_leaves(plans).items()}
    expected = sources.describe_plans(named)
    found = layers.match_layout(adapt(source, expected), expected)
    sources.check_same(expected, found.entries, path, cast=expected)
    return [(functools.partial(found.read, name), plan) for name, plan in named.items()]


def open_source(path: str) -> sources.Source:
    """Opens safetensors files or a run, by tensor name."""
    place = pathlib.Path(local_path("checkpoint.init_from", path, CheckpointError))
    steps = find_steps(place)
    if place.suffix == gguf_file.ENDING:
        return gguf_file.source_of(gguf_file.open_header(place))
    if steps is None:
        return open_files(path, place)
    return open_run(Store(str(steps)))


def open_run(store: Store) -> sources.Source:
    """Opens the newest weights of a run for evaluation, by tensor name."""
    source, _ = open_weights(store)
    return sources.cached(
        source.renamed({tensor_name(name): name for name in source.entries})
    )


def find_config(init_from: str) -> pathlib.Path | None:
    """Finds the config.json beside the weights of `checkpoint.init_from`.

    A GGUF file holds the values itself.
    """
    if not init_from:
        return None
    place = pathlib.Path(local_path("checkpoint.init_from", init_from))
    if place.suffix == gguf_file.ENDING:
        return place
    path = (place if place.is_dir() else place.parent) / CONFIG_NAME
    return path if find_steps(place) is None and path.exists() else None


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
    rounds: bool = False,
) -> tuple[sources.Source, Part]:
    """Opens weights by path in the model, and returns the chosen kind as well.

    With `rounds`, a run that learned rounded matrices gives codes times scales.
    """
    step = store.latest() if step is None else step  # fixed: newer ones may appear
    saved = store.source(step)
    chosen = choose_part(part, saved_parts(saved.entries))
    # EMA skips frozen parameters, which are taken from `master`.
    trees = ("master/", "ema/") if chosen == "ema" else ("master/",)
    source = saved if chosen != "schedule_free" else averaged(saved)
    source = source.renamed(
        {n.removeprefix(t): n for t in trees for n in saved.entries if n.startswith(t)}
    )
    if not merges_adapters:
        return source, chosen
    config = saved_config(store.extra(step))
    whole = without_codes(source)
    # Adapters learned beside rounded matrices.
    if config.quantize and (rounds or config.lora):
        compute_dtype = config.precision.compute_dtype
        model = unrounded_model(store, store.resolve(step))
        whole = rounded(whole, model, config.quantize, compute_dtype)
    return adapters.merged(whole, config.lora) if config.lora else whole, chosen


def unrounded_model(store: Store, step: int) -> Model:
    """Makes the built-in model of a run, before rounding and without adapters.

    The run may have learned another model, of the user.
    """
    config = saved_config(store.extra(step))
    return make_model(dataclasses.replace(config, quantize=None, lora=None))


def averaged(source: sources.Source) -> sources.Source:
    """Averages parameters as `optax.contrib.schedule_free_eval_params` does."""
    states, names = _states(source.entries), dict[str, tuple[str, str]]()
    for name in source.entries:
        path = name.removeprefix("master/")
        held = (x for x in states if f"{x}/z/{path}" in source.entries)
        if path != name and (state := next(held, None)):
            names[name] = f"{state}/b1", f"{state}/z/{path}"

    def read(name: str, index: sources.Index) -> np.ndarray:
        b1_name, z_name = names[name]
        y, z = (source.read(x, index) for x in (name, z_name))
        b1 = np.asarray(source.read_all(b1_name), np.float32)
        average = (y.astype(np.float32) - (1 - b1) * z.astype(np.float32)) / b1
        return average.astype(y.dtype)

    return source.joined(
        sources.Source({name: source.entries[name] for name in names}, read)
    )


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
    named = sources.name_leaves(plans, _TREE)
    wanted = {n: row for n, row in named.items() if not sources.is_key(row.dtype)}
    if not wanted:
        return initial
    place = pathlib.Path(local_path("checkpoint.init_from", path, CheckpointError))
    steps = find_steps(place)
    saved = Store(str(steps)).source() if steps else None
    entries = saved.entries if saved else {}
    expected = sources.describe_plans(wanted)
    held = {name: x for name, x in expected.items() if name in entries}
    statistics = [n for n, e in expected.items() if sources.is_floating(e.dtype)]
    missing = [name for name in statistics if name not in held]
    if missing and jax.process_index() == 0:
        _warn(path, missing)
    sources.check_same(held, {n: entries[n] for n in held}, path, cast=held)
    first = sources.name_leaves(initial, _TREE)
    arrays = [
        place_slices(saved.read_all(name).__getitem__, named[name])
        if saved and name in held
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
