"""Decides once which parts of a larger model start a run, and records the decision."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from absl import logging

from zjax.checkpoint import start as weights
from zjax.checkpoint.contents import digest_start
from zjax.checkpoint.steps import find_steps
from zjax.checkpoint.store import Store
from zjax.config.load import saved_config
from zjax.data import calibration
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
    """Chooses the parts that start a new run, once for each directory and its inputs.

    A choice that an earlier start made of other settings, rows or weights is made anew.

    Raises:
        ConfigError: The model of the run is not a smaller form of the larger model, or
            the data has too few rows.
        CheckpointError: `checkpoint.init_from` does not describe its model; the record
            of an earlier choice is damaged, or is of a run of other parts.
        OutputError: The record cannot be written.
    """
    settings = config.prune
    if settings is None:
        return None
    if Store(str(_path(config).parent / "checkpoints")).latest() is not None:
        return _start_of_run(config)
    large = _large_config(config)
    path, shape = config.checkpoint.init_from, large.model
    problems = pruning.misfits(shape, config.model, settings, path)
    if not problems and pruning.measures(shape, config.model, settings):
        number = {"prune.num_rows": settings.num_rows}
        rows = open_rows(config, "train")
        problems += calibration.row_problems(rows, number, "train")
    if problems:
        raise ConfigError(*problems)
    kept = compute_once(lambda: _known_or_chosen(config, settings, large))
    start = PrunedStart(large, _kept_of(kept))
    if jax.process_index() == 0:
        logging.warning("%s", _describe(start, config))
    return start


def recorded(config: Config) -> PrunedStart | None:
    """Reads what a resumed run started from; nothing is measured again.

    Raises:
        CheckpointError: The record is missing or damaged, or the settings deny it.
    """
    if config.prune is None:
        path = _path(config)
        if compute_once(path.exists):
            problem = f"forgets that the run began with parts that {path} names"
            remedy = "set prune as before; remove the file if no run began from it"
            raise CheckpointError(Problem("prune", None, problem, remedy))
        return None
    return _start_of(config, compute_once(lambda: _read(config)))


def note_given_batches(config: Config) -> None:
    """Logs, until a start is recorded, that no given batches measure importance."""
    is_started = _path(config).exists()
    if not config.prune or not config.checkpoint.init_from or is_started:
        return
    large = _large_config(config).model
    if pruning.measures(large, config.model, config.prune) and not jax.process_index():
        text = "prune: importance is measured on rows of data.source=%r, not on the "
        text += "batches that are given; set data to rows like these, or keep layers "
        text += "by prune.layers='even' or 'listed'"
        logging.warning(text, config.data.source)


def _start_of_run(config: Config) -> PrunedStart:
    """Returns what a run with checkpoints started from, to make step 0 again."""
    assert config.prune is not None
    found = compute_once(lambda: _read(config))
    start = _start_of(config, found)
    asked = _asked(config, config.prune, start.large)
    others = [x for x in ("sizes", "prune") if found["asked"].get(x) != asked[x]]
    if others:
        names = " and ".join(_NAMES[x] for x in others)
        problem = f"holds a run that began from other parts: {names} differ"
        remedy = "use the settings of the run, or another directory"
        raise CheckpointError(Problem("directory", config.directory, problem, remedy))
    return start


def _start_of(config: Config, found: Mapping[str, Any]) -> PrunedStart:
    """Makes the start of a record."""
    large = convert.from_mapping(schema.Model, found["asked"]["large"])
    return PrunedStart(_with_model(config, large), _kept_of(found["kept"]))


_NAMES = {
    "init_from": "checkpoint.init_from",
    "large": "the model of checkpoint.init_from",
    "sizes": "sizes of model",
    "prune": "prune",
    "weights": "the weights of checkpoint.init_from",
    "dtype": "precision.compute_dtype",
    "rows": "rows (data or seed)",
}
"""Names of the inputs of a choice in messages."""


def _asked(config: Config, settings: prune.Prune, large: Config) -> dict[str, Any]:
    """Lists the settings that a choice depends on."""
    sizes = pruning.sizes(large.model, config.model)
    return _plain(
        {
            "init_from": config.checkpoint.init_from,
            "large": mappings.to_mapping(large.model),
            "sizes": {name: small for name, (_, small) in sizes.items()},
            "prune": mappings.to_mapping(settings),
        }
    )


def _known_or_chosen(
    config: Config, settings: prune.Prune, large: Config
) -> dict[str, Any]:
    """Returns the kept parts of the record, or chooses and records them."""
    asked, batches = _asked(config, settings, large), []
    if pruning.measures(large.model, config.model, settings):
        batches = calibration.read_batches(
            open_rows(config, "train"),
            settings.num_rows,
            length=config.data.length,
            seed=config.seed,
        )
        asked |= {
            "weights": digest_start(config.checkpoint.init_from),
            "dtype": config.precision.compute_dtype,
            "rows": calibration.digest_batches(batches),
        }
    known = _read(config) if _path(config).exists() else {}
    before = known.get("asked", asked)
    if others := [x for x in _NAMES if before.get(x) != asked.get(x)]:
        names = " and ".join(_NAMES[x] for x in others)
        text = "%s is of an earlier start, and %s differ: parts are chosen anew"
        logging.warning(text, _path(config), names)
    elif known:
        return known["kept"]
    kept = _choose(config, settings, large, batches)
    _write(config, {"asked": asked, "kept": kept})
    return kept


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


def _choose(
    config: Config, settings: prune.Prune, large: Config, batches: Sequence[Batch]
) -> dict[str, Any]:
    """Measures the larger model on batches if any; returns the kept parts."""
    importance = None
    if batches:
        opened = weights.open_source(config.checkpoint.init_from)
        source = layers.untiled(_renamed(opened, large, config))
        source = layers.restacked(source, list(layers.stack_all(source.entries)))
        dtype = jax.numpy.dtype(config.precision.compute_dtype)
        importance = measure(make_model(large), source, batches, dtype)
    kept = pruning.choose(large.model, config.model, settings, importance)
    return _plain(dataclasses.asdict(kept))


def _plain(value: Any) -> Any:
    """Returns a value as JSON reads it back."""
    return json.loads(json.dumps(value))


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
