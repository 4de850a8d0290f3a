"""Quantised tensors of a Hugging Face checkpoint, dequantised while they are read.

The key `quantization_config` of its config.json says how they are stored.
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from absl import logging

from zjax.checkpoint.layout import Entry
from zjax.checkpoint.views import Index, Source
from zjax.errors import Problem
from zjax.huggingface.codes import Format, Fp8, Mxfp4

KEY = "quantization_config"
"""Key of a config.json."""
_METHOD, _BLOCK = "quant_method", "weight_block_size"
_FIXED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    Mxfp4.method: {},
    Fp8.method: {
        "activation_scheme": ("dynamic",),
        "fmt": ("e4m3",),
        "scale_fmt": ("float", "ue8m0", None),
        "expert_dtype": ("fp8",),
    },
}
"""Values of keys by method; the first one is that of a key that is absent."""
_UNREAD = frozenset(
    """
    modules_to_not_convert ignored_layers modules_to_convert dequantize
    """.split()
)
"""Keys that say what the tensors say, or how to load them."""
_REMEDY = "use a checkpoint of plain weights, such as one saved in bfloat16"


def quantization_problems(
    values: Mapping[str, Any], path: pathlib.Path
) -> Iterator[Problem]:
    """Yields what the quantisation of a config.json has that zjax does not read."""
    found = values.get(KEY)
    if found is None:
        return
    if not isinstance(found, dict):
        problem = f"of {path} is not an object"
        yield Problem(KEY, found, problem, "correct it there")
        return
    method = found.get(_METHOD)
    if not isinstance(method, str) or method not in _FIXED:
        yield _not_read(_METHOD, method, path, " and ".join(_FIXED))
        return
    for name, accepted in _FIXED[method].items():
        if (value := found.get(name, accepted[0])) not in accepted:
            yield _not_read(name, value, path, " or ".join(map(repr, accepted)))
    if method == Fp8.method and not _is_block(found.get(_BLOCK, Fp8.block)):
        yield _not_read(_BLOCK, found[_BLOCK], path, "two sizes")


def unknown_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a quantisation without problems that have no known meaning."""
    found = values.get(KEY) or {}
    known = {_METHOD, *_UNREAD, *_FIXED.get(found.get(_METHOD, ""), ())}
    known |= {_BLOCK} if found.get(_METHOD) == Fp8.method else set()
    return {f"{KEY}.{name}": x for name, x in found.items() if name not in known}


@dataclasses.dataclass(frozen=True)
class Quantized:
    """The tensors of a checkpoint that are codes and scales.

    Args:
        format: Format of them all; None for a checkpoint without any.
        shapes: Their plain shapes by name.
    """

    format: Format | None
    shapes: Mapping[str, tuple[int, ...]]

    def stored(self, plain: Mapping[str, Entry]) -> dict[str, Entry]:
        """The tensors that a file holds for plain ones."""
        entries = dict[str, Entry]()
        for name, entry in plain.items():
            if self.format is None or name not in self.shapes:
                entries[name] = entry
                continue
            names = (f"{name}{ending}" for ending in self.format.endings)
            both = self.format.entries(entry.shape)
            entries |= dict(zip(names, both, strict=True))
        return entries

    def dequantized(self, source: Source) -> Source:
        """The checkpoint with plain tensors alone."""
        form = self.format
        if form is None or not self.shapes:
            return source

        def read(name: str, index: Index) -> np.ndarray:
            if name not in self.shapes:
                return source.read(name, index)
            codes, scales = (f"{name}{ending}" for ending in form.endings)
            return form.read(
                index,
                lambda index: source.read(codes, index),
                lambda index: source.read(scales, index),
            )

        plain = {name: Entry(x, form.dtype) for name, x in self.shapes.items()}
        return Source({**source.entries, **plain}, read)

    def report(self, path: str) -> None:
        """Process 0 logs that values were quantised and are plain now."""
        if self.format is not None and self.shapes and jax.process_index() == 0:
            logging.warning(
                "checkpoint.init_from=%r has %d tensors in %s, which are dequantised "
                "while they are read: the run, its checkpoints and exports are plain",
                *(path, len(self.shapes), self.format.method),
            )


def find_quantized(
    values: Mapping[str, Any], plain: Mapping[str, Entry], source: Source
) -> Quantized:
    """The tensors of a checkpoint that are quantised.

    Args:
        values: A config.json without problems.
        plain: Plain tensors that the model reads, by name.
        source: Tensors as they are stored.
    """
    found = values.get(KEY)
    if found is None:
        return Quantized(None, {})
    is_fp8 = found[_METHOD] == Fp8.method
    form = Fp8(tuple(found.get(_BLOCK, Fp8.block))) if is_fp8 else Mxfp4()
    shapes = {
        name: entry.shape
        for name, entry in plain.items()
        if form.holds(name, entry, source.entries)
    }
    return Quantized(form, shapes)


def _is_block(sizes: Any) -> bool:
    return (
        isinstance(sizes, list | tuple)
        and len(sizes) == len(Fp8.block)
        and all(type(x) is int and x > 0 for x in sizes)
    )


def _not_read(name: str, value: Any, path: pathlib.Path, what: str) -> Problem:
    problem = f"of {path} is not supported: zjax reads {what} alone"
    return Problem(f"{KEY}.{name}", value, problem, _REMEDY)
