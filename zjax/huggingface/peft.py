"""Exports the adapters of a checkpoint in the layout of PEFT."""

import json
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from zjax.checkpoint import views
from zjax.checkpoint.average import open_weights
from zjax.checkpoint.export import cast_entries, write_file
from zjax.checkpoint.layout import Entry
from zjax.checkpoint.store import Store
from zjax.config import schema
from zjax.config.load import load_config
from zjax.errors import ConfigError, Problem
from zjax.huggingface.adapter_tensors import (
    CONFIG_NAME,
    TENSORS_NAME,
    Matrix,
    find_matrices,
    part_error,
    tensor_shape,
    to_tensor,
)
from zjax.huggingface.export import find_kind, new_folder

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

    Only one process may call this.

    Args:
        store: The checkpoints.
        path: Output directory, which must be empty or missing.
        part: Kind of weights, as in `export_safetensors`.
        step: Step of the checkpoint; None for the newest.
        dtype: `float32`, `bfloat16` or `float16`; empty for the saved dtype.

    Returns:
        Bytes written.

    Raises:
        CheckpointError: There is no such checkpoint, or the directory is not empty or
            cannot be written.
        ConfigError: The run has no adapters, or trains other parameters, too; no family
            computes what its model does, or it joins an adapted matrix with others.
    """
    step = store.latest() if step is None else step
    config = load_config(store.extra(step).get("config", {}))
    _check_settings(config)
    kind = find_kind(config.model, "leave out --format=peft")
    source, _ = open_weights(store, part, step, merges_adapters=False)
    matrices = dict[str, Matrix]()
    for matrix in find_matrices(source.entries, config.model, kind):
        if matrix.layout.row.parts:
            raise part_error(matrix, config.lora, kind, _MERGES)
        matrices[matrix.tensor] = matrix
    source = views.restacked(source, [matrix.ours for matrix in matrices.values()])
    found = {
        name: Entry(
            tensor_shape(matrix, source.entries[matrix.ours].shape),
            source.entries[matrix.ours].dtype,
        )
        for name, matrix in matrices.items()
    }
    entries = cast_entries(found, dtype)

    def read(name: str) -> Iterator[np.ndarray]:
        matrix = matrices[name]
        yield to_tensor(matrix, source.read_all(matrix.ours))

    with new_folder(path) as folder:
        text = json.dumps(_values(config, matrices.values()), indent=2) + "\n"
        (folder / CONFIG_NAME).write_text(text)
        file = folder / TENSORS_NAME
        write_file(file, entries, {"format": "pt"}, read)
    return sum(file.stat().st_size for file in pathlib.Path(path).iterdir())


def _check_settings(config: schema.Config) -> None:
    lora = config.lora
    if not lora.rank:
        problem = "has no adapters to export"
        remedy = "leave out --format=peft"
        raise ConfigError(Problem("lora.rank", 0, problem, remedy))
    if lora.also_train:
        problem = "trains parameters that are no adapters"
        raise ConfigError(Problem("lora.also_train", lora.also_train, problem, _MERGES))
    if config.checkpoint.resize_vocabulary:
        problem = "gives tables rows that the base of an adapter lacks"
        field = "checkpoint.resize_vocabulary"
        raise ConfigError(Problem(field, True, problem, _MERGES))


def _values(config: schema.Config, matrices: Any) -> Mapping[str, Any]:
    """Content of adapter_config.json."""
    lora = config.lora
    modules = {re.sub(r"^.*\.\d+\.", "", matrix.module) for matrix in matrices}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if config.model.kind == "decoder" else None,
        "base_model_name_or_path": config.checkpoint.init_from or None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(modules),
        "fan_in_fan_out": not all(m.layout.row.is_transposed for m in matrices),
        "use_dora": lora.form == "dora",
        "use_rslora": False,
        "bias": "none",
        "inference_mode": True,
    }
