"""Adapters of PEFT's layout as those of a run: the opposite of `zjax.huggingface.peft`.

Each tensor is read when its layer is placed, so that one is in memory at a time.
"""

import math
import pathlib
from collections.abc import Iterator, Mapping

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
    TENSORS_NAME,
    find_matrices,
    from_tensor,
    tensor_shape,
)
from zjax.huggingface.export import find_kind
from zjax.huggingface.peft_settings import REMEDY, shape_of
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
    if problems := [*_differences(config.lora, folder)]:
        raise ConfigError(*problems)
    names = {name.replace(".", "/"): name for name in wanted}
    matrices = find_matrices([*names], config, _kind(config), _NEW)
    shapes = {
        name: _shape_of(matrix.ours, names, wanted) for name, matrix in matrices.items()
    }
    file = open_file(folder / TENSORS_NAME, "lora.init_from", REMEDY)
    expected = {
        name: Entry(tensor_shape(matrix, shapes[name]), "float32")
        for name, matrix in matrices.items()
    }
    check_same(expected, file.entries, given, cast=True)
    tensors = {matrix.ours.replace("/", "."): name for name, matrix in matrices.items()}
    entries = {
        ours: Entry(shapes[name], file.entries[name].dtype)
        for ours, name in tensors.items()
    }

    def read(ours: str, index: Index) -> np.ndarray:
        if ours not in tensors:
            return source.read(ours, index)
        name = tensors[ours]
        whole = tuple(slice(0, size) for size in file.entries[name].shape)
        return from_tensor(file.read(name, whole), shapes[name])[index]

    return Source({**source.entries, **entries}, read)


def _shape_of(
    ours: str, names: Mapping[str, str], wanted: Mapping[str, Entry]
) -> tuple[int, ...]:
    """The shape of an array, or of one layer of a stack."""
    stack, layer, _ = ours.partition("[")
    return wanted[names[stack]].shape[1 if layer else 0 :]


def _differences(lora: schema.Lora, folder: pathlib.Path) -> Iterator[Problem]:
    computed = {n: x for n, x in shape_of(folder).items() if n != "dropout"}
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
    return find_kind(config.model) if path is None else read_config(path)["model_type"]
