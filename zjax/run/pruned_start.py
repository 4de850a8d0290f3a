"""Decides once which parts of a larger model start a run, and records the decision."""

import dataclasses
import hashlib
import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from zjax.checkpoint import start as weights
from zjax.checkpoint.steps import find_steps
from zjax.checkpoint.store import Store
from zjax.config.load import saved_config
from zjax.data.source import open_rows
from zjax.errors import CheckpointError, ConfigError, Problem
from zjax.files import (
    MAX_INDEX_BYTES,
    local_path,
    new_file,
    parse_json,
    read_text,
    writing,
)
from zjax.models.build import make_model
from zjax.processes.broadcast import compute_once
from zjax.settings import convert, mappings, prune, schema
from zjax.settings.schema import Config
from zjax.typing import Batch
from zjax.weights import huggingface, layers, pruning
from zjax.weights.config_json import model_settings
from zjax.weights.importance import measure
from zjax.weights.source import Entry, Source, name_leaves

NAME = "pruned.json"
"""File in the directory of a run that records what the run started from."""
_MAX_TOKENS = 8_192
"""Tokens of a measured batch, which bounds the activations in memory."""


class PrunedStart(NamedTuple):
    """The larger model of a run, and the parts that stay."""

    large: Config
    """Settings of a run of the larger model."""
    kept: pruning.Kept

    def adapt(self, source: Source, config: Config) -> Source:
        """Returns the kept parts of a source of the larger model."""
        model = make_model(self.large)
        whole = _renamed(source, self.large, config)
        return pruning.pruned(whole, self.kept, pruning.named_dims(model))


def decide(config: Config) -> PrunedStart | None:
    """Chooses the parts that start a new run, once for each directory and its settings.

    Raises:
        ConfigError: The model of the run is not a smaller form of the larger model.
        CheckpointError: `checkpoint.init_from` does not describe its model, or the
            record of an earlier choice is damaged.
        OutputError: The record cannot be written.
    """
    settings = config.prune
    if settings is None:
        return None
    large = _large_config(config)
    path, shape = config.checkpoint.init_from, large.model
    if problems := pruning.misfits(shape, config.model, settings, path):
        raise ConfigError(*problems)
    asked = _plain(
        {
            "init_from": path,
            "large": mappings.to_mapping(shape),
            "model": mappings.to_mapping(config.model),
            "prune": mappings.to_mapping(settings),
        }
    )

    def choose() -> dict[str, Any]:
        known = _read(config) if _path(config).exists() else {}
        if known.get("asked") == asked:
            return known["kept"]
        kept = _choose(config, settings, large)
        _write(config, {"asked": asked, "kept": kept})
        return kept

    start = PrunedStart(large, _kept_of(compute_once(choose)))
    if jax.process_index() == 0:
        logging.warning("%s", _describe(start, config))
    return start


def recorded(config: Config) -> PrunedStart | None:
    """Reads what a resumed run started from; nothing is measured again.

    Raises:
        CheckpointError: The record is missing or damaged.
    """
    if config.prune is None:
        return None
    found = compute_once(lambda: _read(config))
    large = convert.from_mapping(schema.Model, found["asked"]["large"])
    return PrunedStart(_with_model(config, large), _kept_of(found["kept"]))


def _write(config: Config, record: Mapping[str, Any]) -> None:
    """Writes the record of a choice with a checksum."""
    path = _path(config)
    text = json.dumps(dict(record) | {"sha256": _digest(record)})
    with writing(path), new_file(path) as partial:
        partial.write_text(text + "\n")


def _read(config: Config) -> dict[str, Any]:
    """Reads the record of a choice."""
    path = _path(config)
    try:
        found = parse_json(read_text(path, MAX_INDEX_BYTES))
        if not isinstance(found, dict) or found.pop("sha256", "") != _digest(found):
            raise ValueError("its checksum differs")
    except (OSError, ValueError, ConfigError) as error:
        reason = getattr(error, "strerror", None) or error
        problem = f"cannot read which parts of a larger model began the run: {reason}"
        remedy = "restore the file, or begin a run in another directory"
        raise CheckpointError(
            Problem("directory", str(path), problem, remedy)
        ) from error
    return found


def _describe(start: PrunedStart, config: Config) -> str:
    """Says which parts stay."""
    kept, large, small = start.kept, start.large.model, config.model
    parts = [f"layers {', '.join(map(str, kept.layers))} of {large.num_layers}"]
    if kept.channels is not None:
        parts.append(f"{small.embed_size} of {large.embed_size} channels")
    if kept.groups is not None:
        parts.append(f"{small.num_heads} of {large.num_heads} heads")
    if kept.hidden is not None:
        parts.append(f"{small.mlp_size} of {large.mlp_size} hidden channels")
    if kept.experts is not None:
        parts.append(f"{len(kept.experts[0])} experts of a layer")
    path = config.checkpoint.init_from
    return f"checkpoint.init_from={path!r} is pruned: {'; '.join(parts)} stay"


def _choose(config: Config, settings: prune.Prune, large: Config) -> dict[str, Any]:
    """Measures the larger model if needed; returns the kept parts as a mapping."""
    importance = None
    if pruning.measures(large.model, config.model, settings):
        opened = weights.open_source(config.checkpoint.init_from)
        source = layers.untiled(_renamed(opened, large, config))
        source = layers.restacked(source, list(layers.stack_all(source.entries)))
        importance = measure(
            make_model(large),
            source,
            [*_batches(config, settings.num_rows)],
            jax.numpy.dtype(config.precision.compute_dtype),
        )
    kept = pruning.choose(large.model, config.model, settings, importance)
    return _plain(dataclasses.asdict(kept))


def _plain(value: Any) -> Any:
    """Returns a value as JSON reads it back."""
    return json.loads(json.dumps(value))


def _batches(config: Config, num_rows: int) -> Iterator[Batch]:
    """Yields the first training rows in batches of equal shapes."""
    rows = open_rows(config, "train")
    num_rows = min(num_rows, len(rows))
    size = math.gcd(num_rows, max(1, _MAX_TOKENS // config.data.length))
    for first in range(0, num_rows, size):
        batch = rows.read(np.arange(first, first + size))
        yield {
            x: batch[x] for x in ("tokens", "segment_ids", "positions") if x in batch
        }


def _large_config(config: Config) -> Config:
    """Returns the settings of a run of the larger model."""
    path = config.checkpoint.init_from
    place = pathlib.Path(local_path("checkpoint.init_from", path, CheckpointError))
    if steps := find_steps(place):
        return _with_model(config, saved_config(Store(str(steps)).extra()).model)
    if found := weights.find_config(path):
        settings = model_settings(found.parent)
        return _with_model(config, convert.from_mapping(schema.Model, settings))
    problem = "says of no model how large it is, which prune compares"
    remedy = "give the directory of a run, or of a Hugging Face checkpoint"
    raise CheckpointError(Problem("checkpoint.init_from", path, problem, remedy))


def _with_model(config: Config, model: schema.Model) -> Config:
    """Returns settings with the model of another run, undivided."""
    model = dataclasses.replace(
        model, mlp_tiles=1, layers_per_scan=0, activation_memory="device"
    )
    plain = {"lora": None, "quantize": None, "distill": None}
    return dataclasses.replace(config, model=model, zero=schema.Zero(), **plain)


def _renamed(source: Source, large: Config, config: Config) -> Source:
    """Gives the arrays of a Hugging Face checkpoint the names of the larger model."""
    model = make_model(large)
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    wanted = {
        pruning.tensor_name(n): Entry(x.shape, str(x.dtype))
        for n, x in name_leaves(params).items()
    }
    config_json = weights.find_config(config.checkpoint.init_from)
    return huggingface.adapted(
        source, wanted, config_json, large.model, config.checkpoint
    )


def _path(config: Config) -> pathlib.Path:
    return pathlib.Path(config.directory).absolute() / NAME


def _digest(record: Mapping[str, Any]) -> str:
    """Checksum of a record."""
    text = json.dumps(dict(record), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _kept_of(found: Mapping[str, Any]) -> pruning.Kept:
    """Reads kept parts from a mapping."""

    def numbers(value: Any) -> Any:
        return tuple(map(numbers, value)) if isinstance(value, list) else value

    return pruning.Kept(**{name: numbers(x) for name, x in found.items()})
