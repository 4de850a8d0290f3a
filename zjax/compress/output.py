"""Writes compressed weights as a directory that transformers and vLLM load."""

import functools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from zjax.checkpoint.export import MAX_SHARD_BYTES
from zjax.checkpoint.tokenizer import CheckpointTokenizer, write_tokenizer
from zjax.compress.files import RECIPE, FileLayout
from zjax.compress.opened import BLOCKS, Opened
from zjax.compress.partial import PartialOutput
from zjax.compress.parts import places_of
from zjax.weights import huggingface, quantized
from zjax.weights.codes import KEY
from zjax.weights.config_json import CONFIG_NAME
from zjax.weights.files import cast, new_folder, write_json, write_shards
from zjax.weights.source import Entry, Index, Source


def _tensors(opened: Opened, kind: str, source: Source) -> Source:
    """Maps arrays by path to tensors of a family."""
    return huggingface.model_tensors(source, opened.config.model, kind, opened.name)


def write_output(
    opened: Opened,
    partial: PartialOutput,
    output: str,
    tokenizer: tuple[CheckpointTokenizer, pathlib.Path | None],
    layout: FileLayout,
    draw: Callable[[pathlib.Path], None],
) -> int:
    """Writes config.json, tokenizer and safetensors; returns the bytes written.

    The directory is renamed once complete, after `draw` has added pictures.
    """
    model, kind = opened.config.model, layout.kind
    source, scales = _weights(opened, partial), _scales(opened, partial)
    tensors = cast(_tensors(opened, kind, source), opened.dtype)
    values = huggingface.config_of(model, kind) | {"dtype": opened.dtype}
    if layout.scheme is not None:
        given: dict[str, Any] = {"scales": _tensors(opened, kind, scales)}
        given |= {"scheme": layout.scheme, "plain": layout.plain}
        given |= {"dtype": opened.dtype}
        tensors, values[KEY] = quantized.compress(tensors, model, kind, RECIPE, **given)
    with new_folder(output) as folder:
        values |= write_tokenizer(folder, *tokenizer)
        write_json(folder / CONFIG_NAME, values)
        write_shards(folder, tensors, {"format": "pt"}, MAX_SHARD_BYTES)
        written = sum(file.stat().st_size for file in folder.iterdir())
        draw(folder)
    return written


def _weights(opened: Opened, partial: PartialOutput) -> Source:
    """Returns all weights by path, with the compressed blocks."""
    outside = {
        name.replace(".", "/"): name
        for name in opened.source.entries
        if not name.startswith(f"{BLOCKS}.")
    }
    return opened.source.renamed(outside).joined(_blocks(opened, partial, 0))


def _scales(opened: Opened, partial: PartialOutput) -> Source:
    """Returns the scale of each weight, with the names and shapes of all weights.

    Arrays that no rule rounds have scales of 1, which are never read.
    """
    found = _blocks(opened, partial, 1)
    entries = {
        name.replace(".", "/"): Entry(entry.shape, "float32")
        for name, entry in opened.source.entries.items()
    }

    def read(name: str, index: Index) -> np.ndarray:
        shape = entries[name].shape
        if name not in found.entries:
            return np.ones(shape, np.float32)[index]
        scales = found.read_all(name)
        # Groups lie along the flattened inputs, behind the experts if there are any.
        first = shape[0] if scales.ndim > 2 else 1
        scales = scales.reshape(first, *scales.shape[-2:])
        inputs = math.prod(shape) // (first * scales.shape[2])
        repeated = np.repeat(scales, inputs // scales.shape[1], axis=1)
        return repeated.reshape(shape)[index]

    return Source(entries, read)


def _blocks(opened: Opened, partial: PartialOutput, part: int) -> Source:
    """Returns parameters (0) or scales (1) of all compressed blocks, by path."""
    places = places_of(opened.decoder)
    opened_block = functools.lru_cache(maxsize=1)(lambda i: partial.open(i)[part])
    entries, origins = dict[str, Entry](), dict[str, tuple[int, str]]()
    for index, place in enumerate(places):
        for path, entry in opened_block(index).entries.items():
            name = place.named(path)
            entries[name], origins[name] = entry, (index, path)

    def read(name: str, index: Index) -> np.ndarray:
        number, path = origins[name]
        return opened_block(number).read(path, index)

    return Source(entries, read)
