"""Exports the weights of a run: one file, a Hugging Face directory, or adapters."""

import pathlib
from collections.abc import Mapping

from absl import logging

from zjax.checkpoint import learned
from zjax.checkpoint.start import find_config, open_weights, unrounded_model
from zjax.checkpoint.steps import find_steps
from zjax.checkpoint.store import Store
from zjax.checkpoint.tokenizer import tokenizer_of_run, write_tokenizer
from zjax.config.load import saved_config
from zjax.errors import ConfigError, Problem
from zjax.files import local_path, new_file
from zjax.weights import huggingface, layers, peft, quantized
from zjax.weights.codes import KEY
from zjax.weights.config_json import CONFIG_NAME
from zjax.weights.files import (
    cast,
    new_folder,
    writable,
    write_file,
    write_json,
    write_shards,
)
from zjax.weights.peft_tensors import TENSORS_NAME
from zjax.weights.source import Source, cached

MAX_SHARD_BYTES = 5 * 10**9
"""Most tensor bytes of one file, the default of transformers."""


def export_safetensors(
    store: Store,
    path: str,
    *,
    part: str = "auto",
    step: int | None = None,
    dtype: str = "",
) -> int:
    """Writes the weights of a checkpoint, frozen and tied arrays included, to one file.

    The file is renamed once complete. Only one process may call this.

    Args:
        store: Checkpoints of a run.
        path: Output file; an existing one is replaced.
        part: Kind of weights: `raw`, `ema` or `schedule_free`; `auto` prefers averaged
            weights.
        step: Step of the checkpoint; None for the newest.
        dtype: `float32`, `bfloat16` or `float16` for floating-point arrays; empty for
            the saved dtype.

    Returns:
        Bytes written.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, a dtype or two
            names do not fit the format, or the file cannot be written.
        ConfigError: The checkpoint does not hold that part.
    """
    step = store.latest() if step is None else step
    source, part = open_weights(store, part, step, rounds=True)
    source = layers.untiled(cached(source))
    source = layers.restacked(source, list(layers.stack_all(source.entries)))
    source = cast(source, dtype)
    metadata = {"format": "flax", "part": part, "step": str(step)}
    target = pathlib.Path(path)
    with writable(path), new_file(target) as partial:
        write_file(partial, source, metadata)
    return target.stat().st_size


def export_huggingface(
    store: Store,
    path: str,
    *,
    part: str = "auto",
    step: int | None = None,
    dtype: str = "",
    quantize: str = "",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> int:
    """Writes a directory that transformers loads: config.json, safetensors, an index.

    `quantize` rounds matrices to nearest as a scheme of `weights.quantized` says. A run
    that learned rounded matrices has the same codes again; other grids are refused.

    Tokenizer, chat template and end ids come from the data of the run. A run without a
    tokenizer record, such as a run on given batches, takes the files of the Hugging
    Face checkpoint with which it started, if still there. The log says which.

    `path` must be empty or missing, and is renamed once complete. One array with all
    layers is in memory at a time. Only one process may call this.
    """
    chosen = store.resolve(step)
    if quantize:
        check_learned(store, chosen, quantize, learned.HUGGINGFACE)
    source, _ = open_weights(store, part, chosen, rounds=True)
    return write_huggingface(
        store,
        path,
        source,
        step=chosen,
        dtype=dtype,
        quantize=quantize,
        max_shard_bytes=max_shard_bytes,
    )


def check_learned(
    store: Store, step: int, quantize: str, layouts: Mapping[str, learned.Layout]
) -> None:
    """Refuses codes that are not the codes which a layer of a run learned."""
    config = saved_config(store.extra(step))
    learned.check_grid(
        config.quantize,
        unrounded_model(store, step),
        quantize,
        layouts,
        has_adapters=bool(config.lora),
    )


def write_huggingface(
    store: Store,
    path: str,
    source: Source,
    *,
    step: int,
    dtype: str = "",
    quantize: str = "",
    scales: Source | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> int:
    """Writes given weights of a run's model as `export_huggingface` does.

    `source` has arrays by path in the model. `scales`, with the same names and shapes,
    has the scales of weights that lie on the grid of `quantize` already.
    """
    config = saved_config(store.extra(step))
    model, start = config.model, find_start(config.checkpoint.init_from)
    kind = huggingface.find_kind(model)
    huggingface.report_dropouts(model, kind)
    place = str(store.directory)
    source = huggingface.model_tensors(source, model, kind, place)
    plain_dtype = dtype or next(iter(source.entries.values())).dtype
    values = huggingface.config_of(model, kind) | {"dtype": plain_dtype}
    if quantize:
        if scales is not None:
            scales = huggingface.model_tensors(scales, model, kind, place)
        source, values[KEY] = quantized.compress(
            source, model, kind, quantize, dtype=dtype, scales=scales
        )
    else:
        source = cast(source, dtype)
    with new_folder(path) as folder:
        # Replaces the null ids of `config_of`.
        values |= write_tokenizer(folder, tokenizer_of_run(store, step), start)
        write_json(folder / CONFIG_NAME, values)
        # transformers refuses files without a known format.
        write_shards(folder, source, {"format": "pt"}, max_shard_bytes)
    return _num_bytes(path)


def find_start(start: str) -> pathlib.Path | None:
    """Finds the Hugging Face checkpoint at the beginning of a chain of runs."""
    # Ends a cycle of runs that start from one another.
    seen = set[str]()
    while start not in {"", *seen}:
        if (path := find_config(start)) is not None:
            return path.parent
        steps = find_steps(pathlib.Path(local_path("checkpoint.init_from", start)))
        if steps is None:
            problem = "has no config.json; its files do not go along"
            logging.warning("tokenizer: checkpoint.init_from=%r %s", start, problem)
            return None
        seen.add(start)
        config = saved_config(Store(str(steps)).extra())
        start = config.checkpoint.init_from
    return None


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
    if not config.lora:
        problem, remedy = "has no adapters to export", "leave out --format=peft"
        raise ConfigError(Problem("lora", None, problem, remedy))
    if config.checkpoint.resize_vocabulary:
        problem = "gives tables rows that the base of an adapter lacks"
        field = "checkpoint.resize_vocabulary"
        raise ConfigError(Problem(field, True, problem, peft.MERGES))
    if config.quantize:
        rules = [*config.quantize.rules]
        problem = "round the base of the adapters, which PEFT loads unrounded"
        raise ConfigError(Problem("quantize.rules", rules, problem, peft.MERGES))
    kind = huggingface.find_kind(config.model, "leave out --format=peft")
    source, _ = open_weights(store, part, step, merges_adapters=False)
    source, values = peft.adapter_tensors(source, config.model, config.lora, kind)
    source = cast(source, dtype)
    values["base_model_name_or_path"] = config.checkpoint.init_from or None
    with new_folder(path) as folder:
        write_json(folder / peft.CONFIG_NAME, values)
        write_file(folder / TENSORS_NAME, source, {"format": "pt"})
    return _num_bytes(path)


def _num_bytes(path: str) -> int:
    return sum(file.stat().st_size for file in pathlib.Path(path).iterdir())
