"""Writes compressed weights as a directory that transformers and vLLM load."""

import functools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from zjax.checkpoint.export import MAX_SHARD_BYTES
from zjax.checkpoint.tokenizer import CheckpointTokenizer, write_tokenizer
from zjax.compress.opened import BLOCKS, Opened
from zjax.compress.partial import PartialOutput
from zjax.compress.parts import group_of, places_of
from zjax.errors import ConfigError
from zjax.settings.compress import Compress
from zjax.weights import huggingface, quantized
from zjax.weights.codes import KEY
from zjax.weights.compressed_tensors import Scheme
from zjax.weights.config_json import CONFIG_NAME
from zjax.weights.files import cast, new_folder, write_json, write_shards
from zjax.weights.source import Entry, Index, Source

_LAYOUTS = {
    ("int4", "compute"): ("pack-quantized", "int4"),
    ("int8", "compute"): ("pack-quantized", "int8"),
    ("int8", "int8"): ("int-quantized", "int8"),
    ("float8", "float8"): ("float-quantized", "float8_e4m3fn"),
}
"""Layouts of compressed-tensors by the types of weights and activations."""
_NAME = "the recipe"
"""Name of the scheme of a recipe in messages."""


def scheme_of(settings: Compress) -> Scheme | None:
    """Returns the scheme of compressed-tensors that stores the codes of all rules.

    None where rules differ, or the format has no such codes.

    Example:
        >>> scheme_of(Compress()).layout
        'pack-quantized'
    """
    kinds = {(x.weights, x.activations, group_of(x)) for x in settings.rules}
    if len(kinds) != 1 or not any(rule.matches(BLOCKS) for rule in settings.rules):
        return None
    ((weights, activations, group),) = kinds
    found = _LAYOUTS.get((weights, activations))
    if found is None:
        return None
    return Scheme(*found, group=group, rounds_inputs=activations != "compute")


def check_output(opened: Opened, settings: Compress) -> tuple[str, str]:
    """Finds a family of Hugging Face and whether codes are packed.

    Returns the `model_type`, and why weights go out as numbers of the compute dtype;
    empty for codes.

    Raises:
        ConfigError: No family computes the outputs of the model.
    """
    model = opened.config.model
    kind = huggingface.find_kind(model, "compress another model")
    scheme = scheme_of(settings)
    if scheme is None:
        return kind, "compressed-tensors has no such codes for all rules"
    entries = _tensors(opened, kind, _unread(opened)).entries
    try:
        # Reads nothing: names and shapes alone.
        source = Source(entries, _refuse)
        quantized.compress(source, model, kind, _NAME, scheme=scheme)
    except ConfigError as error:
        return kind, error.problems[0].problem
    return kind, ""


def _refuse(name: str, index: Index) -> np.ndarray:
    """Reads nothing."""
    raise AssertionError(name)


def _unread(opened: Opened) -> Source:
    """Returns the shapes of all parameters, by path."""
    entries = {
        name.replace(".", "/"): Entry(entry.shape, opened.dtype)
        for name, entry in opened.source.entries.items()
    }
    return Source(entries, _refuse)


def _tensors(opened: Opened, kind: str, source: Source) -> Source:
    """Maps arrays by path to tensors of a family."""
    return huggingface.model_tensors(source, opened.config.model, kind, opened.name)


def write_output(
    opened: Opened,
    settings: Compress,
    partial: PartialOutput,
    output: str,
    tokenizer: tuple[CheckpointTokenizer, pathlib.Path | None],
    form: tuple[str, str],
    draw: Callable[[pathlib.Path], None],
) -> int:
    """Writes config.json, tokenizer and safetensors; returns the bytes written.

    `form` is what `check_output` found. The directory is renamed once complete, after
    `draw` has added pictures.
    """
    kind, plain = form
    model = opened.config.model
    source, scales = _weights(opened, partial), _scales(opened, partial)
    tensors = cast(_tensors(opened, kind, source), opened.dtype)
    values = huggingface.config_of(model, kind) | {"dtype": opened.dtype}
    if not plain:
        given: dict[str, Any] = {"scales": _tensors(opened, kind, scales)}
        given |= {"scheme": scheme_of(settings), "dtype": opened.dtype}
        tensors, values[KEY] = quantized.compress(tensors, model, kind, _NAME, **given)
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
    found, unread = _blocks(opened, partial, 1), _unread(opened)
    entries = {name: Entry(x.shape, "float32") for name, x in unread.entries.items()}

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
