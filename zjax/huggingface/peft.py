"""Exports the adapters of a checkpoint in the layout of PEFT."""

import functools
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from zjax.checkpoint import layers
from zjax.checkpoint.export import cast_entries, write_file
from zjax.checkpoint.layers import Source
from zjax.checkpoint.layout import Entry
from zjax.checkpoint.model_state import open_weights
from zjax.checkpoint.store import Store
from zjax.config.load import saved_config
from zjax.errors import ConfigError, Problem
from zjax.huggingface.adapter_tensors import (
    CONFIG_NAME,
    KEY,
    TENSORS_NAME,
    Matrix,
    find_matrices,
    find_saved,
    names_of_trained,
    not_apart,
    part_error,
    tensor_of,
    tensor_shape,
    to_tensor,
)
from zjax.huggingface.export import find_kind, new_folder
from zjax.huggingface.layout import Layout
from zjax.settings import schema

_MERGES = "use --format=hf, which merges adapters"


def export_peft(
    store: Store,
    path: str,
    *,
    part: str = "auto",
    step: int | None = None,
    dtype: str = "",
) -> int:
    """Writes a directory that PEFT loads: adapter_config.json and safetensors.

    `path` must be empty or missing. Only one process may call this.
    """
    step = store.latest() if step is None else step
    config = saved_config(store.extra(step))
    model, lora = config.model, config.lora
    if not lora:
        problem, remedy = "has no adapters to export", "leave out --format=peft"
        raise ConfigError(Problem("lora", None, problem, remedy))
    if config.checkpoint.resize_vocabulary:
        problem = "gives tables rows that the base of an adapter lacks"
        field = "checkpoint.resize_vocabulary"
        raise ConfigError(Problem(field, True, problem, _MERGES))
    kind = find_kind(model, "leave out --format=peft")
    source, _ = open_weights(store, part, step, merges_adapters=False)
    matrices = _find_matrices(source, model, lora, kind)
    names = names_of_trained(lora, model, kind)
    tensors = _of_adapters(matrices)
    tensors |= _of_modules(names, matrices, model, lora, kind)
    source = layers.restacked(source, [tensor.ours for tensor in tensors.values()])
    found = {
        name: Entry(
            tensor.shape(source.entries[tensor.ours].shape),
            source.entries[tensor.ours].dtype,
        )
        for name, tensor in tensors.items()
    }
    entries = cast_entries(found, dtype)

    def read(name: str) -> Iterator[np.ndarray]:
        tensor = tensors[name]
        yield tensor.convert(source.read_all(tensor.ours))

    with new_folder(path) as folder:
        values = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM" if model.kind == "decoder" else None,
            "base_model_name_or_path": config.checkpoint.init_from or None,
            **_values(lora, matrices, names),
        }
        (folder / CONFIG_NAME).write_text(json.dumps(values, indent=2) + "\n")
        file = folder / TENSORS_NAME
        write_file(file, entries, {"format": "pt"}, read)
    return sum(file.stat().st_size for file in pathlib.Path(path).iterdir())


class _Tensor(NamedTuple):
    """Tensor of PEFT: name of the array, and converters of shape and values."""

    ours: str
    shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    convert: Callable[[np.ndarray], np.ndarray]


def _find_matrices(
    source: Source, model: schema.Model, lora: schema.Lora, kind: str
) -> list[Matrix]:
    """Finds all adapter matrices, and refuses adapters on parts of a module."""
    matrices = [*find_matrices(source.entries, model, kind)]
    for matrix in matrices:
        # PEFT adapts a joined module as a whole.
        if matrix.layout.row.parts:
            raise part_error(matrix, lora, kind, _MERGES)
    return matrices


def _of_adapters(matrices: Iterable[Matrix]) -> dict[str, _Tensor]:
    """Tensors of adapter matrices, by tensor name."""
    return {
        matrix.tensor: _Tensor(
            matrix.ours,
            functools.partial(tensor_shape, matrix),
            functools.partial(to_tensor, matrix),
        )
        for matrix in matrices
    }


def _of_modules(
    names: Sequence[str],
    matrices: Iterable[Matrix],
    model: schema.Model,
    lora: schema.Lora,
    kind: str,
) -> dict[str, _Tensor]:
    """Tensors of modules that are trained in full, by tensor name."""
    saved = find_saved(names, model, kind)
    adapted = {matrix.module for matrix in matrices}
    if reasons := [*not_apart(saved, model, adapted)]:
        problems = (
            Problem("lora.also_train", lora.also_train, reason, _MERGES)
            for reason in reasons
        )
        raise ConfigError(*problems)

    def tensor(ours: str, layout: Layout) -> _Tensor:
        # In a function of its own, since closures in the loop would share `layout`.
        place = ours.replace(".", "/")
        convert = functools.partial(layout.piece_of, place=())
        return _Tensor(place, lambda _: layout.tensor_shape, convert)

    return {tensor_of(x): tensor(ours, x) for ours, x in saved.items()}


def _values(
    lora: schema.Lora, matrices: Sequence[Matrix], saved: Sequence[str]
) -> Mapping[str, Any]:
    """Content of adapter_config.json on the adapters."""
    # PEFT compares the end of a path, so that one name serves all layers.
    modules = {re.sub(r"^.*\.\d+\.", "", matrix.module) for matrix in matrices}
    return {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(modules),
        KEY: list(saved) or None,
        # True for GPT-2, where kernels have inputs first.
        "fan_in_fan_out": not all(m.layout.row.is_transposed for m in matrices),
        "use_dora": lora.form == "dora",
        "use_rslora": False,  # alpha is divided by the rank
        "bias": "none",
        "inference_mode": True,
    }
