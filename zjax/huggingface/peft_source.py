"""Adapters of PEFT's layout as those of a run: the opposite of `zjax.huggingface.peft`.

Each tensor is read when its layer is placed, so that one is in memory at a time.
"""

import collections
import math
import pathlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from zjax.checkpoint import layers
from zjax.checkpoint.layout import Entry, check_same
from zjax.checkpoint.views import Index, Source
from zjax.checkpoint.weights import open_file
from zjax.config import schema
from zjax.config.paths import local_path
from zjax.errors import ConfigError, Problem
from zjax.huggingface.adapter_tensors import (
    CONFIG_NAME,
    PREFIX,
    TENSORS_NAME,
    Matrix,
    find_matrices,
    from_tensor,
    part_error,
    tensor_shape,
)
from zjax.huggingface.export import find_kind
from zjax.huggingface.peft_settings import (
    REMEDY,
    read_values,
    report_unread,
    shape_of,
)
from zjax.huggingface.saved_modules import KEY, check_saved, find_saved, tensor_of
from zjax.huggingface.settings import read_config
from zjax.huggingface.source import TOKENS, find_config

_NEW = "leave it empty, for new adapters"


def with_peft(
    source: Source, wanted: Mapping[str, Entry], config: schema.Config
) -> Source:
    """The arrays of a checkpoint, and the adapters of `lora.init_from`.

    Args:
        source: Arrays of the base model, with dots in their names.
        wanted: Arrays of the model to start, layers stacked or not.
        config: Read for `lora`, `model` and `checkpoint.init_from`.

    Raises:
        ConfigError: `lora` differs from the adapter_config.json, or that asks for what
            zjax does not compute.
        CheckpointError: Tensors are missing, unexpected or of the wrong shape.
    """
    given, wanted = config.lora.init_from, layers.stack_all(wanted)
    folder = pathlib.Path(local_path("lora.init_from", given))
    if TOKENS not in wanted:
        problem = "has adapters of a built-in model, and this is another one"
        raise ConfigError(Problem("lora.init_from", given, problem, _NEW))
    values = read_values(folder)
    if problems := [*_differences(config.lora, values, folder)]:
        raise ConfigError(*problems)
    report_unread(values, folder / CONFIG_NAME)
    names = {name.replace(".", "/"): name for name in wanted}
    kind = _kind(config)
    found = find_matrices([*names], config.model, kind)
    matrices = {matrix.ours.replace("/", "."): matrix for matrix in found}
    _check_parts(matrices.values(), config.lora, kind)
    modules = values.get(KEY) or []
    saved = find_saved(modules, config.model, kind)
    check_saved(modules, saved, config, folder / CONFIG_NAME)
    shapes = {ours: _shape_of(x.ours, names, wanted) for ours, x in matrices.items()}
    file = open_file(folder / TENSORS_NAME, "lora.init_from", REMEDY)
    expected = {
        matrix.tensor: Entry(tensor_shape(matrix, shapes[ours]), "float32")
        for ours, matrix in matrices.items()
    }
    expected |= {
        tensor_of(layout): Entry(layout.tensor_shape, "float32")
        for layout in saved.values()
    }
    check_same(expected, file.entries, given, cast=expected)
    entries = {
        ours: Entry(shapes[ours], file.entries[matrix.tensor].dtype)
        for ours, matrix in matrices.items()
    }
    entries |= {
        ours: Entry(layout.shape, file.entries[tensor_of(layout)].dtype)
        for ours, layout in saved.items()
    }
    replaced = {*saved, *map(layers.stack_of, saved)}
    base = {name: x for name, x in source.entries.items() if name not in replaced}

    def read(ours: str, index: Index) -> np.ndarray:
        if ours in saved:
            return saved[ours].read(index, lambda name, x: file.read(PREFIX + name, x))
        if ours not in matrices:
            return source.read(ours, index)
        name = matrices[ours].tensor
        whole = tuple(slice(0, size) for size in file.entries[name].shape)
        return from_tensor(matrices[ours], file.read(name, whole), shapes[ours])[index]

    return Source({**base, **entries}, read)


def _check_parts(matrices: Collection[Matrix], lora: schema.Lora, kind: str) -> None:
    """Refuses modules of which `lora.targets` adapts some parts alone."""
    numbers = collections.Counter(matrix.tensor for matrix in matrices)
    for matrix in matrices:
        if numbers[matrix.tensor] < len(matrix.layout.row.parts):
            raise part_error(matrix, lora, kind, "adapt the other parts, too")


def _shape_of(
    ours: str, names: Mapping[str, str], wanted: Mapping[str, Entry]
) -> tuple[int, ...]:
    """The shape of an array, or of one layer of a stack."""
    stack, layer, _ = ours.partition("[")
    return wanted[names[stack]].shape[1 if layer else 0 :]


def _differences(
    lora: schema.Lora, values: Mapping[str, Any], folder: pathlib.Path
) -> Iterator[Problem]:
    computed = {n: x for n, x in shape_of(values).items() if n != "dropout"}
    for name, theirs in computed.items():
        mine = getattr(lora, name)
        is_same = (
            math.isclose(mine, theirs, rel_tol=1e-6)
            if isinstance(mine, float)
            else mine == theirs
        )
        if not is_same:
            problem = f"is not the {theirs!r} of {folder / CONFIG_NAME}"
            yield Problem(f"lora.{name}", mine, problem, f"use {theirs!r}")


def _kind(config: schema.Config) -> str:
    """Family of the base model: that of its config.json, or of what it computes."""
    path = find_config(config.checkpoint.init_from)
    if path is None:
        return find_kind(config.model, "leave lora.init_from empty")
    return read_config(path)["model_type"]
