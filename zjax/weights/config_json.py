"""Converts a Hugging Face config.json to settings of the built-in models."""

import copy
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from absl import logging

from zjax.errors import ConfigError, Problem, find_fault
from zjax.files import local_path, parse_json, read_text
from zjax.settings import choices, convert, schema
from zjax.settings.mixture import experts_by_layer
from zjax.settings.ranges import MAX_LAYERS
from zjax.weights import codes, gguf_file, gguf_names, rotation
from zjax.weights.families import FAMILIES
from zjax.weights.family import (
    BOOKKEEPING,
    DROPOUTS,
    KNOWN,
    PADDING,
    Family,
    Fault,
    Key,
    check,
    computed_alone,
    is_accepted,
    refused,
    window_faults,
    window_settings,
)

STEP, DENSE = "decoder_sparse_step", "mlp_only_layers"
"""Keys for the period of layers with experts, and for listed dense layers."""


def layer_settings(values: Mapping[str, Any], num_layers: int) -> dict[str, int]:
    """Settings of layers with experts, from a config.json without problems."""
    found = _find_settings(values, num_layers)
    return found or {"every": 1, "first_dense": 0}


def layer_values(model: schema.Model, moe: schema.MoE) -> dict[str, Any]:
    """Keys of a config.json for the layers with experts of a model."""
    every, first = moe.every, moe.first_dense
    # A period counts from layer 0; any other start takes a list of dense layers.
    step = 1 if first % every else every
    experts = enumerate(experts_by_layer(model))
    dense = [i for i, number in experts if not number and (i + 1) % step == 0]
    return {STEP: step, DENSE: dense}


def layer_faults(values: Mapping[str, Any], num_layers: Any) -> Iterator[Fault]:
    """Yields wrong types, and layers with experts that zjax does not compute."""
    step, dense = values.get(STEP, 1), values.get(DENSE) or []
    if type(step) is not int or step < 1:
        yield Fault(STEP, step, "is no period of layers")
    elif not isinstance(dense, list) or any(type(x) is not int for x in dense):
        yield Fault(DENSE, dense, "is no list of layers")
    elif type(num_layers) is int and _find_settings(values, num_layers) is None:
        name = DENSE if dense else STEP
        why = "zjax computes experts in every n-th layer from one on"
        yield refused(name, values.get(name), why)


def weight_faults(values: Mapping[str, Any], family: Family) -> Iterator[Fault]:
    """Yields numbers and weights of experts that zjax does not compute.

    zjax weighs the only expert of a token by score, not by 1.
    """
    keys = {key.setting: (n, key.default) for n, key in family.keys.items()}
    name, default = keys["moe.num_experts"]
    number = values.get(name, default)
    if type(number) is int and number < 1:
        yield Fault(name, number, "is not positive")
    name, default = keys["moe.top_k"]
    normalises, usual = keys.get("moe.normalise", ("", True))
    if values.get(name, default) == 1 and values.get(normalises, usual):
        yield refused(name, 1, "zjax weighs a single expert by its score, not by 1")


def _find_settings(values: Mapping[str, Any], num_layers: int) -> dict[str, int] | None:
    """Settings that put experts into the layers of the keys; None if impossible."""
    step, dense = values.get(STEP, 1), {*(values.get(DENSE) or [])}
    layers = [i for i in range(step - 1, num_layers, step) if i not in dense]
    if not layers:
        return None
    after = layers[1] if layers[1:] else num_layers
    # Listed dense layers may lengthen the period.
    for every in (step, after - layers[0]):
        first = layers[0] - every + 1
        if first >= 0 and [*range(first, num_layers)[every - 1 :: every]] == layers:
            return {"every": every, "first_dense": first}
    return None


CONFIG_NAME = "config.json"


def model_settings(directory: str | os.PathLike[str], **changes: Any) -> dict[str, Any]:
    """Reads the `model` settings that compute a Hugging Face checkpoint.

    `changes` replace keys of the config.json. A ConfigError lists every key that zjax
    does not compute.

    Example:
        >>> import json, tempfile
        >>> shape = {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 50}
        >>> shape |= {"model_type": "gpt2", "n_positions": 16}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with open(f"{directory}/config.json", "w") as file:
        ...         json.dump(shape, file)
        ...     settings = model_settings(directory, attn_pdrop=0.0)
        >>> settings["dropout_rate"], settings["attention_dropout_rate"]
        (0.1, 0.0)
    """
    folder = pathlib.Path(local_path("directory", directory))
    path = folder if folder.suffix == gguf_file.ENDING else folder / CONFIG_NAME
    values = read_config(path) | changes
    family = find_family(values, path)
    values = _with_usual_names(values, family)
    dropout = Key("", float, family.default_dropout)
    rates = dict.fromkeys(family.dropouts.values(), dropout)
    check([*_faults(values, family), *_faults_of(rates, values)], path)
    _report_unknown(values, family, path)
    return settings_of(values, family) | _dropout(values, family)


def shape_of(
    values: Mapping[str, Any], path: pathlib.Path
) -> tuple[dict[str, Any], Family]:
    """Settings of the shape, on which weights depend, and the family."""
    family = find_family(values, path)
    values = _with_usual_names(values, family)
    check(_faults(values, family), path)
    return settings_of(values, family), family


def read_config(
    path: pathlib.Path, what: str = "a Hugging Face checkpoint"
) -> dict[str, Any]:
    """Reads a JSON file of `what`, such as a config.json, as a dict."""
    if path.suffix == gguf_file.ENDING:
        return _read_gguf(path)
    name, remedy = path.name, f"give the directory of {what}"
    if fault := find_fault(path):
        raise ConfigError(Problem(name, str(path), fault, remedy))
    try:
        values = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        problem = f"is not readable JSON ({error})"
        raise ConfigError(Problem(name, str(path), problem, remedy)) from error
    if not isinstance(values, dict):
        problem = f"is a {type(values).__name__}, not an object"
        raise ConfigError(Problem(name, str(path), problem, remedy))
    return values


def _read_gguf(path: pathlib.Path) -> dict[str, Any]:
    """Reads the metadata of a GGUF file as the values of a config.json."""
    header = gguf_file.open_header(path)
    check(gguf_names.unread_faults(header.metadata), path)
    source = gguf_file.source_of(header)
    return gguf_names.values_of(header.metadata, source.entries, source.read_all)


def find_family(values: Mapping[str, Any], path: pathlib.Path) -> Family:
    """Family of a `model_type`; a ConfigError lists the known families."""
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        problem, known = f"of {path} is not supported", ", ".join(FAMILIES)
        remedy = f"use a checkpoint of {known}, or import its weights as your own model"
        raise ConfigError(Problem("model_type", kind, problem, remedy))
    return FAMILIES[kind]


def _with_usual_names(values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Copies values of aliases to the usual keys, where such keys are missing."""
    found = {usual: values[x] for x, usual in family.aliases.items() if x in values}
    # A usual key wins over an alias.
    return found | dict(values)


def settings_of(values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Settings from the values of a config.json without problems."""
    # Deep, as settings of sections are filled in below.
    settings = copy.deepcopy(dict(family.constant))
    for name, key in family.keys.items():
        value = values.get(name, key.default)
        section, _, field = key.setting.rpartition(".")
        target = settings[section] if section else settings
        target[field] = key.to_setting(value)
    if family.padding:
        first = values.get(family.padding, PADDING) + 1
        settings["positions"]["first"] = first
        # The table of positions has unused rows up to the padding id.
        settings["max_length"] -= first
    if family.is_rotary:
        # No table limits rotary models: a run may change the length.
        settings["max_length"] = settings["positions"]["max_positions"]
        model = convert.from_mapping(schema.Model, settings)
        settings["positions"] |= rotation.rotation_settings(values, family, model)
    num_layers = settings["num_layers"]
    settings["window"] = window_settings(values, family.windows, num_layers)
    if settings["window"] and family.is_rotary:
        settings["window"]["rope_theta"] = float(rotation.local_theta(values, family))
    if family.has_steps:
        settings["moe"] |= layer_settings(values, num_layers)
    if family.is_mixture and settings["moe"]["top_k"] == 1:
        settings["moe"]["normalise"] = True  # zjax never normalises 1
    if family.biases:
        settings |= _biases(*(values.get(name, False) for name in family.biases))
    return settings


def entries_of(model: schema.Model, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a model for given settings, with sections flattened.

    Example:
        >>> model = schema.Model(moe=schema.TokenChoice())
        >>> entries_of(model, {"num_heads": 1, "moe": {"top_k": 2}})
        {'num_heads': 12, 'moe.top_k': 1}
    """
    return {path: choices.value_at(model, path) for path in _paths(settings)}


def _paths(settings: Mapping[str, Any], section: str = "") -> Iterator[str]:
    """Yields the paths of nested settings."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _paths(value, f"{section}{name}.")
        else:
            yield f"{section}{name}"


def _biases(attention: bool, mlp: bool = False) -> dict[str, Any]:
    """Settings for two keys of biases; `attention_bias` follows if both agree."""
    if attention == mlp:
        return {"use_bias": mlp, "attention_bias": "use_bias"}
    return {"use_bias": mlp, "attention_bias": "all" if attention else "none"}


def _dropout(values: Mapping[str, Any], family: Family) -> dict[str, float]:
    """Dropout rates by setting; a rate without a key is 0."""
    default, keys = family.default_dropout, family.dropouts
    given = {name: values.get(key, default) for name, key in keys.items()}
    return {name: float(given.get(name, 0.0)) for name in DROPOUTS}


def _faults(values: Mapping[str, Any], family: Family) -> Iterator[Fault]:
    """Yields faults of all keys except dropouts."""
    yield from _faults_of(family.keys, values)
    yield from codes.quantization_faults(values)
    for name, accepted in family.fixed.items():
        if not is_accepted(value := values.get(name, accepted[0]), accepted):
            yield computed_alone(name, value, accepted)
    for alias, usual in family.aliases.items():
        if (given := values.get(alias, values.get(usual))) != values.get(usual):
            yield Fault(alias, given, f"differs from {usual}={values[usual]!r}")
    if family.is_rotary:
        yield from rotation.rotation_faults(values, family)
    yield from _faults_of(dict.fromkeys(family.biases, Key("", bool, False)), values)
    names = {key.setting: name for name, key in family.keys.items()}
    if family.padding:
        yield from Key("", int, PADDING).faults(family.padding, values)
        name = names["max_length"]
        first, length = values.get(family.padding, PADDING), values.get(name)
        if type(first) is type(length) is int and first + 1 >= length:
            problem = f"leaves no position of {name}={length}"
            yield Fault(family.padding, first, problem)
    number = values.get(names["num_layers"])
    if type(number) is int and not 1 <= number <= MAX_LAYERS:
        remedy = f"use 1 to {MAX_LAYERS} there"
        yield Fault(names["num_layers"], number, "is out of range", remedy)
    else:
        yield from window_faults(values, family.windows, number)
        if family.has_steps:
            yield from layer_faults(values, number)
    if family.is_mixture:
        yield from weight_faults(values, family)


def _faults_of(keys: Mapping[str, Key], values: Mapping[str, Any]) -> Iterator[Fault]:
    return (fault for name, key in keys.items() for fault in key.faults(name, values))


def _report_unknown(
    values: Mapping[str, Any], family: Family, path: pathlib.Path
) -> None:
    """Warns of keys without a known meaning."""
    known = {*BOOKKEEPING, *family.keys, *family.fixed, *family.biases}
    known |= {*family.dropouts.values(), *family.unread, family.padding, *KNOWN}
    known |= {*family.written, codes.KEY}
    known |= {*family.windows.keys, *family.aliases}
    known |= {STEP, DENSE} if family.has_steps else set()
    known |= rotation.KNOWN if family.is_rotary else set()
    unknown = {name: x for name, x in values.items() if name not in known}
    unknown |= rotation.unknown_keys(values, family) if family.is_rotary else {}
    unknown |= codes.unknown_keys(values)
    if unknown:
        text = ", ".join(f"{name}={x!r}" for name, x in unknown.items())
        logging.warning("%s: unknown and not read: %s", path, text)
