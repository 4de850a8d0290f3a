"""Quantised tensors of a Hugging Face checkpoint, dequantised while they are read."""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from zjax.checkpoint.layout import Entry
from zjax.checkpoint.views import Index, Source
from zjax.errors import Problem

Read = Callable[[Index], np.ndarray]
"""Function that reads a slice of one tensor."""


@dataclasses.dataclass(frozen=True)
class Fp8:
    """Codes of 8 bits, with a scale for each block of a matrix.

    Values are rounded once, to float32. NaN codes are NaN.

    Args:
        block: Outputs and inputs of a block; the last ones of a matrix may have less.
    """

    block: tuple[int, int] = (128, 128)
    method: ClassVar = "fp8"
    endings: ClassVar = ("", "_scale_inv")
    """Endings of the names of codes and of scales."""
    dtype: ClassVar = "float32"
    """Dtype of plain values."""

    def holds(self, name: str, entry: Entry, stored: Mapping[str, Entry]) -> bool:
        """Whether the tensor of a plain name has codes."""
        return name in stored and stored[name].dtype == "float8_e4m3fn"

    def entries(self, shape: tuple[int, ...]) -> tuple[Entry, Entry]:
        """Codes and scales of a tensor."""
        blocks = map(_num_blocks, shape, self._sizes(len(shape)))
        return Entry(shape, "float8_e4m3fn"), Entry(tuple(blocks), "float32")

    def read(self, index: Index, codes: Read, scales: Read) -> np.ndarray:
        """A slice of the plain values, from functions that read the two tensors."""
        sizes = self._sizes(len(index))
        factors = scales(tuple(map(_blocks_of, index, sizes))).astype(np.float32)
        *outer, length = factors.shape
        factors = factors.reshape(math.prod(outer), length)
        factors = _spread(factors, 1, index[-1], sizes[-1])
        numbers = np.arange(len(factors)).reshape(outer)  # the factors of each row
        for dim, size in enumerate(sizes[:-1]):
            numbers = _spread(numbers, dim, index[dim], size)
        numbers = numbers.reshape(-1)
        stored = codes(index).view(np.uint8)
        rows = stored.reshape(numbers.size, factors.shape[1])
        values = np.empty(rows.shape, np.float32)
        for some in _chunks(*rows.shape):
            plain = _float8_values()[rows[some]]
            np.multiply(plain, factors[numbers[some]], out=values[some])
        return values.reshape(stored.shape)

    def _sizes(self, num_dims: int) -> tuple[int, ...]:
        """Elements of a block along each dim."""
        return (*[1] * (num_dims - 2), *self.block)[-num_dims:]


@dataclasses.dataclass(frozen=True)
class Mxfp4:
    """Codes of 4 bits, two in a byte, with a power of two for each 32 inputs.

    The stored matrices of experts are transposed. Values are exact in bfloat16 but for
    those beyond its largest one, which are infinite. The scale 255 is NaN.
    """

    method: ClassVar = "mxfp4"
    endings: ClassVar = ("_blocks", "_scales")
    dtype: ClassVar = "bfloat16"

    def holds(self, name: str, entry: Entry, stored: Mapping[str, Entry]) -> bool:
        """Whether there are codes or scales of experts in place of a plain tensor."""
        is_stored = any(f"{name}{ending}" in stored for ending in self.endings)
        return is_stored and len(entry.shape) == 3

    def entries(self, shape: tuple[int, ...]) -> tuple[Entry, Entry]:
        """Codes and scales of a tensor of experts, inputs and outputs."""
        experts, inputs, outputs = shape
        blocks = experts, outputs, _num_blocks(inputs, _MX_BLOCK)
        return Entry((*blocks, _MX_BLOCK // 2), "uint8"), Entry(blocks, "uint8")

    def read(self, index: Index, codes: Read, scales: Read) -> np.ndarray:
        """A slice of the plain values, as a view of one in the order of the file."""
        experts, inputs, outputs = index
        blocks = experts, outputs, _blocks_of(inputs, _MX_BLOCK)
        low = codes((*blocks, slice(0, _MX_BLOCK // 2)))
        *shape, num_blocks, num_bytes = low.shape
        low, high = low.reshape(-1, num_bytes), scales(blocks).reshape(-1, 1)
        values = np.empty(low.shape, np.uint32)
        for some in _chunks(*low.shape):
            pairs = high[some].astype(np.uint16) << 8 | low[some]
            values[some] = _mx_values()[pairs]
        values = values.view(jnp.bfloat16).reshape(*shape, num_blocks * _MX_BLOCK)
        return values[..., _inside(inputs, _MX_BLOCK)].swapaxes(1, 2)


Format = Fp8 | Mxfp4
_CHUNK = 2**17
"""Codes that are looked up at once."""
_MX_BLOCK = 32
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _num_blocks(size: int, block: int) -> int:
    return -(-size // block)


def _blocks_of(span: slice, block: int) -> slice:
    """Blocks that hold a slice."""
    return slice(span.start // block, _num_blocks(span.stop, block))


def _spread(x: np.ndarray, dim: int, span: slice, block: int) -> np.ndarray:
    """For each element of a slice what `x` has for its block."""
    numbers = np.arange(span.start, span.stop) // block - span.start // block
    return x.take(numbers, dim)


def _chunks(num_rows: int, length: int) -> Iterator[slice]:
    """Rows that fit a cache together: indices into a table have 8 bytes each."""
    step = max(1, _CHUNK // max(1, length))
    return (slice(first, first + step) for first in range(0, num_rows, step))


def _inside(span: slice, block: int) -> slice:
    """The slice, counted from the beginning of its first block."""
    start = span.start - span.start // block * block
    return slice(start, start + span.stop - span.start)


@functools.cache
def _float8_values() -> np.ndarray:
    """The values of all codes."""
    return np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)


@functools.cache
def _mx_values() -> np.ndarray:
    """Two values of bfloat16, as 32 bits, of each scale and byte: `scale * 256 + byte`.

    The low half of a byte comes first.
    """
    halves = np.array([*_FP4, *(-x for x in _FP4)], np.float32)
    byte = np.arange(256)
    pairs = np.stack([halves[byte & 15], halves[byte >> 4]], -1)
    exponents = np.arange(256)[:, np.newaxis, np.newaxis] - 127
    with np.errstate(over="ignore"):
        values = np.ldexp(pairs, exponents)
    values[255] = np.nan
    return values.astype(jnp.bfloat16).reshape(-1).view(np.uint32)


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
    """The tensors of a checkpoint that are quantised."""
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
