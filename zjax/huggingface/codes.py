"""Plain values of tensors that are stored as codes and scales.

Both tensors of a format are read slice by slice: of codes those of the slice, of scales
those of the blocks that it touches.

Reference: the OCP Microscaling Formats (MX) Specification v1.0, and DeepSeek-V3,
arXiv:2412.19437.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from zjax.checkpoint.layout import Entry
from zjax.checkpoint.views import Index

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
