"""Plain values of tensors that are stored as codes and scales.

Both tensors of a format are read slice by slice: of codes those of the slice, of scales
those of the blocks that it touches.

Reference: the OCP Microscaling Formats (MX) Specification v1.0, and DeepSeek-V3,
arXiv:2412.19437.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
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
        for dim in reversed(range(len(index))):  # the copies of rows come last
            factors = np.repeat(factors, sizes[dim], dim)
            local = _inside(index[dim], sizes[dim])
            factors = factors[(*[slice(None)] * dim, local)]
        return _float8_values()[codes(index).view(np.uint8)] * factors

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
        pairs = scales(blocks).astype(np.uint16)[..., np.newaxis] << 8
        pairs = pairs | codes((*blocks, slice(0, _MX_BLOCK // 2)))
        values = _mx_values()[pairs].view(jnp.bfloat16)
        num_experts, num_outputs, num_blocks, _ = values.shape
        values = values.reshape(num_experts, num_outputs, num_blocks * _MX_BLOCK)
        return values[..., _inside(inputs, _MX_BLOCK)].swapaxes(1, 2)


Format = Fp8 | Mxfp4
_MX_BLOCK = 32
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _num_blocks(size: int, block: int) -> int:
    return -(-size // block)


def _blocks_of(span: slice, block: int) -> slice:
    """Blocks that hold a slice."""
    return slice(span.start // block, _num_blocks(span.stop, block))


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
