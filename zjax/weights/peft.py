"""Adapters in the layout of PEFT: as settings and weights of a run, and back."""

import collections
import math
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
from absl import logging

from zjax.errors import ConfigError, Problem
from zjax.files import local_path
from zjax.settings import schema
from zjax.weights import layers
from zjax.weights.config_json import read_config
from zjax.weights.family import Fault, check, is_accepted
from zjax.weights.files import open_file
from zjax.weights.huggingface import TOKENS, find_kind
from zjax.weights.peft_tensors import (
    CONFIG_NAME,
    ENDINGS,
    KEY,
    PREFIX,
    TENSORS_NAME,
    WITHOUT,
    adapted_kernels,
    adapter_layouts,
    check_saved,
    find_saved,
    module_of,
    names_of_trained,
    not_apart,
    part_error,
    path_of,
    patterns_of_saved,
    prefixed,
    rows_of_tensors,
    without_layer,
)
from zjax.weights.source import Entry, Source, check_same
from zjax.weights.tensors import from_tensors, to_tensors

REMEDY = "give a directory that PEFT saved, or that --format=peft wrote"
_NONE = (None, False, (), [], {})
_FIXED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
} | dict.fromkeys(
    """
    rank_pattern alpha_pattern layers_to_transform layer_replication
    lora_bias use_qalora use_bdlora target_parameters trainable_token_indices
    alora_invocation_tokens arrow_config loftq_config kasa_config velora_config
    monteclora_config corda_config lora_ga_config
    """.split(),
    _NONE,
)
"""Accepted values of keys that are no settings; the first value is the default."""
_READ = "r", "lora_alpha", "use_rslora", "use_dora", "lora_dropout", KEY
_UNREAD = frozenset(
    """
    auto_mapping base_model_name_or_path ensure_weight_tying eva_config exclude_modules
    fan_in_fan_out inference_mode layers_pattern megatron_config megatron_core
    peft_version qalora_group_size revision target_modules task_type
    """.split()
)
"""Keys without a meaning beside the tensors."""


def adapter_settings(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the `lora` settings that compute the adapters of a directory of PEFT.

    Settings, `init_from` among the rest, are for `config.lora.update`.

    Example:
        >>> adapter_settings("nowhere")
        Traceback (most recent call last):
        zjax.errors.ConfigError: adapter_config.json='nowhere/adapter_config.json' \
does not exist; give the directory of an adapter of PEFT
    """
    folder = pathlib.Path(local_path("directory", directory))
    values = read_values(folder)
    settings = shape_of(values)
    file = open_file(folder / TENSORS_NAME, "lora.init_from", REMEDY)
    settings["targets"] = _targets(file.entries, folder / TENSORS_NAME)
    if names := values.get(KEY):
        found = patterns_of_saved(names, file.entries, folder / CONFIG_NAME)
        settings["also_train"] = found
    return settings | {"init_from": os.fspath(directory)}


def read_values(folder: pathlib.Path) -> dict[str, Any]:
    """Reads an adapter_config.json, and refuses unsupported values."""
    path = folder / CONFIG_NAME
    values = read_config(path, "an adapter of PEFT")
    check(_faults(values), path)
    return values


def shape_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Rank, alpha, form and dropout in an adapter_config.json."""
    rank, alpha = values["r"], float(values["lora_alpha"])
    if values.get("use_rslora"):
        # rslora divides alpha by the root of the rank, zjax by the rank.
        alpha *= math.sqrt(rank)
    form, dropout = "lora", float(values.get("lora_dropout", 0.0))
    if values.get("use_dora"):
        # PEFT's dropout beside DoRA drops more than inputs of the adapter: not read.
        form, dropout = "dora", 0.0
    return {"rank": rank, "alpha": alpha, "form": form, "dropout": dropout}


def _faults(values: Mapping[str, Any]) -> Iterator[Fault]:
    """Yields a fault for each unsupported value and each wrong type."""
    for name, accepted in _FIXED.items():
        if not is_accepted(value := values.get(name, accepted[0]), accepted):
            yield Fault(name, value, "is not supported", WITHOUT)
    for name, kinds in {"r": (int,), "lora_alpha": (int, float)}.items():
        number: Any = values.get(name)
        if type(number) not in kinds or not 0 < number < math.inf:
            yield Fault(name, number, "is no positive number")
    rate: Any = values.get("lora_dropout", 0.0)
    if type(rate) not in (int, float) or not 0 <= rate < 1:
        yield Fault("lora_dropout", rate, "is no probability below 1")
    names = values.get(KEY) or []
    if not isinstance(names, list) or not all(isinstance(x, str) and x for x in names):
        yield Fault(KEY, names, "is no list of modules")
    for name in ("use_rslora", "use_dora"):
        if type(values.get(name, False)) is not bool:
            yield Fault(name, values[name], "is neither true nor false")


def report_unread(values: Mapping[str, Any], path: pathlib.Path) -> None:
    """Warns on process 0 of keys of an adapter_config.json that are not read."""
    known = {*_FIXED, *_READ, *_UNREAD}
    unread = {name: x for name, x in values.items() if name not in known}
    if values.get("use_dora") and values.get("lora_dropout"):
        unread["lora_dropout"] = values["lora_dropout"]
    if unread and jax.process_index() == 0:
        text = ", ".join(f"{name}={x!r}" for name, x in unread.items())
        logging.warning("%s: not read: %s", path, text)


def _targets(names: Iterable[str], path: pathlib.Path) -> tuple[str, ...]:
    """Patterns of the layers of a built-in model that tensors adapt."""
    rows = rows_of_tensors()
    found, problems = set[str](), list[Problem]()
    for name in names:
        if not name.endswith(ENDINGS["a"]):
            continue
        module = name.removeprefix(PREFIX).removesuffix(f".{ENDINGS['a']}")
        # The first number is the layer.
        tensor = re.sub(r"\.\d+\.", ".{layer}.", f"{module}.weight", count=1)
        # zjax adapts neither token tables nor experts.
        ours = [
            path_of(row).removesuffix("/kernel")
            for row in rows.get(tensor, ())
            if row.ours.endswith(".kernel") and not {"vocab", "experts"} & {*row.names}
        ]
        # `$`, since attention/query begins attention/query_latent, too.
        found.update(f"{layer}$" for layer in ours)
        if not ours:
            problem = f"in {path.parent} adapts no layer that zjax adapts"
            problems.append(Problem(TENSORS_NAME, name, problem, REMEDY))
    if not found and not problems:
        problem = f"has no tensor that ends in {ENDINGS['a']}"
        problems.append(Problem(TENSORS_NAME, str(path), problem, REMEDY))
    if problems:
        raise ConfigError(*problems[:3])
    return tuple(sorted(found))


_NEW = "leave it empty, for new adapters"


def with_peft(
    source: Source,
    wanted: Mapping[str, Entry],
    lora: schema.Lora,
    model: schema.Model,
    config: pathlib.Path | None,
) -> Source:
    """Adds the adapters of `lora.init_from` to a base model, read from `source`.

    `config` is the config.json of the base model; None for a base model of zjax.
    """
    given, wanted = lora.init_from, layers.stack_all(wanted)
    folder = pathlib.Path(local_path("lora.init_from", given))
    if TOKENS not in wanted:
        problem = "has adapters of a built-in model, and this is another one"
        raise ConfigError(Problem("lora.init_from", given, problem, _NEW))
    values = read_values(folder)
    if problems := [*_differences(lora, values, folder)]:
        raise ConfigError(*problems)
    report_unread(values, folder / CONFIG_NAME)
    kind = (
        read_config(config)["model_type"]
        if config
        else find_kind(model, "leave lora.init_from empty")
    )
    names = {name.replace(".", "/") for name in wanted}
    kernels = adapted_kernels(names, model, kind)
    # PEFT adapts a joined module as a whole.
    numbers = collections.Counter(map(module_of, kernels.values()))
    for ours, kernel in kernels.items():
        if numbers[module_of(kernel)] < len(kernel.row.parts):
            raise part_error(ours, kernel, lora, kind, "adapt the other parts, too")
    modules = values.get(KEY) or []
    saved = find_saved(modules, model, kind)
    check_saved(modules, saved, lora, model, folder / CONFIG_NAME)
    layouts = adapter_layouts(kernels, names, lora.rank) | prefixed(saved)
    layouts = {ours.replace("/", "."): layout for ours, layout in layouts.items()}
    file = open_file(folder / TENSORS_NAME, "lora.init_from", REMEDY)
    expected = {
        layout.first: Entry(layout.tensor_shape, "float32")
        for layout in layouts.values()
    }
    check_same(expected, file.entries, given, cast=expected)
    adapters = from_tensors(Source(file.entries, file.read), layouts)
    # Modules that PEFT trained in full replace arrays of the base model.
    replaced = {*saved, *map(layers.stack_of, saved)}
    return source.without(replaced).joined(adapters)


def _differences(
    lora: schema.Lora, values: Mapping[str, Any], folder: pathlib.Path
) -> Iterator[Problem]:
    """Yields a problem for each setting that differs from adapter_config.json."""
    computed = {n: x for n, x in shape_of(values).items() if n != "dropout"}
    for name, theirs in computed.items():
        mine = getattr(lora, name)
        is_same = (
            # The root of the rank in alpha is rounded.
            math.isclose(mine, theirs, rel_tol=1e-6)
            if isinstance(mine, float)
            else mine == theirs
        )
        if not is_same:
            problem = f"is not the {theirs!r} of {folder / CONFIG_NAME}"
            yield Problem(f"lora.{name}", mine, problem, f"use {theirs!r}")


MERGES = "use --format=hf, which merges adapters"


def adapter_tensors(
    source: Source, model: schema.Model, lora: schema.Lora, kind: str
) -> tuple[Source, dict[str, Any]]:
    """Returns the tensors of the adapters of a run, and the adapter_config.json."""
    names = layers.stack_all(source.entries)
    kernels = adapted_kernels(names, model, kind)
    for ours, kernel in kernels.items():
        # PEFT adapts a joined module as a whole.
        if kernel.row.parts:
            raise part_error(ours, kernel, lora, kind, MERGES)
    modules = {module_of(kernel) for kernel in kernels.values()}
    trained = names_of_trained(lora, model, kind)
    saved = find_saved(trained, model, kind)
    if reasons := [*not_apart(saved, model, modules)]:
        problems = (
            Problem("lora.also_train", lora.also_train, reason, MERGES)
            for reason in reasons
        )
        raise ConfigError(*problems)
    layouts = adapter_layouts(kernels, names, lora.rank) | {
        ours.replace(".", "/"): layout for ours, layout in prefixed(saved).items()
    }
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if model.kind == "decoder" else None,
        "base_model_name_or_path": None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        # PEFT compares the end of a path, so that one name serves all layers.
        "target_modules": sorted({without_layer(module) for module in modules}),
        KEY: trained or None,
        # True for GPT-2, where kernels have inputs first.
        "fan_in_fan_out": not all(x.row.is_transposed for x in kernels.values()),
        "use_dora": lora.form == "dora",
        "use_rslora": False,  # alpha is divided by the rank
        "bias": "none",
        "inference_mode": True,
    }
    return to_tensors(layers.restacked(source, list(layouts)), layouts), values
