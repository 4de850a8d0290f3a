"""GGUF files, which llama.cpp, Ollama and LM Studio run: read by slices, and written.

A file is metadata, the list of tensors, and tensors of rows of blocks. The library
`gguf` rounds and restores blocks, and writes files; files are read here, with bounds.

Reference: docs/gguf.md of github.com/ggml-org/ggml.
"""

import collections
import dataclasses
import math
import os
import pathlib
import struct
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from zjax.errors import CheckpointError, Problem, check_installed, find_fault
from zjax.files import MAX_INDEX_BYTES
from zjax.weights.grid import codes_on_grid, shared_scales
from zjax.weights.source import Entry, Index, Source

ENDING = ".gguf"
TYPES = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "mxfp4", "bf16", "f16", "f32")
"""Types of matrices that zjax writes, by the names of llama.cpp."""
FLOATS = ("bf16", "f16", "f32")
"""Types without codes."""
_HALVES = {"q8_0": 0, "q4_0": 8, "q5_0": 16}
"""Number added to a code of types whose scale may be given."""
PLAIN = frozenset({"token_embd.weight", "output.weight"})
"""Matrices that no type of blocks stores."""
_FLOATS = ("position_embd.weight", "ffn_gate_inp.weight")
_FILE_TYPES = {
    **{"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9},
    **{"bf16": 32, "mxfp4": 38},
}
"""`general.file_type` by type."""
_FIELD = "checkpoint.init_from"
_REMEDY = "give another GGUF file"


def type_of(name: str, shape: Sequence[int], quantize: str) -> str:
    """Chooses the type of a tensor.

    Tables and heads stay plain, all that is no matrix is float32, and matrices whose
    inputs are no whole blocks are float16, as llama.cpp chooses.

    Example:
        >>> type_of("blk.0.ffn_up.weight", (64, 32), "q4_0")
        'q4_0'
        >>> type_of("blk.0.ffn_up.weight", (64, 24), "q4_0")
        'f16'
    """
    is_matrix = len(shape) > 1 and not name.endswith(_FLOATS)
    if not is_matrix or quantize == "f32":
        return "f32"
    if quantize in ("f16", "bf16"):
        return quantize
    return "f16" if name in PLAIN or shape[-1] % BLOCK else quantize


BLOCK = 32
"""Inputs of a block of the quantised types that zjax writes."""


def write(
    path: pathlib.Path,
    architecture: str,
    metadata: Mapping[str, Any],
    source: Source,
    quantize: str,
    scales: Source | None = None,
) -> None:
    """Writes a file, one tensor in memory at a time; does not sync.

    Args:
        path: File to write.
        architecture: `general.architecture`.
        metadata: Other metadata by full name: int, float, bool, str, or lists of these.
        source: Tensors by name, float32.
        quantize: One of `TYPES`.
        scales: Scales of weights on a grid, by the names and shapes of `source`.
    """
    check_installed("gguf")
    import gguf

    types = {n: type_of(n, x.shape, quantize) for n, x in source.entries.items()}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_file_type(_FILE_TYPES[quantize])
    if quantize not in FLOATS:
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, value in metadata.items():
        _add(writer, name, value)
    for name, entry in source.entries.items():
        kind = gguf.GGMLQuantizationType[types[name].upper()]
        shape = gguf.quant_shape_to_byte_shape(entry.shape, kind)
        size = math.prod(shape)
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), size, kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name in source.entries:
            given = None if scales is None else scales.read_all(name)
            blocks = blocks_of(name, source.read_all(name), types[name], given)
            writer.write_tensor_data(blocks)
    finally:
        writer.close()


def _add(writer: Any, name: str, value: Any) -> None:
    """Adds metadata with the width that llama.cpp expects."""
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    add[type(value)](name, value)


def blocks_of(
    name: str, array: np.ndarray, kind: str, scales: np.ndarray | None = None
) -> np.ndarray:
    """Rounds a float32 tensor to the blocks of a type, uint8.

    Args:
        name: Name for messages.
        array: Tensor, whose last dim is whole blocks.
        kind: One of `TYPES`.
        scales: Scale of each weight of a tensor on a grid; None rounds to nearest.
    """
    import gguf

    array = np.ascontiguousarray(array, np.float32)
    with np.errstate(over="ignore"):
        fits = np.isfinite(array.astype(np.float16) if kind == "f16" else array).all()
    if not fits:
        problem = f"has values that are not finite in {kind}"
        raise CheckpointError(Problem("tensor", name, problem, "use bf16 or f32"))
    if scales is not None and kind not in FLOATS:
        return _blocks_on_grid(name, array, kind, scales)
    found = gguf.quantize(array, gguf.GGMLQuantizationType[kind.upper()])
    return found.view(np.uint8)


def _blocks_on_grid(
    name: str, array: np.ndarray, kind: str, scales: np.ndarray
) -> np.ndarray:
    """Packs weights that are products of codes and given scales."""
    if kind not in _HALVES:
        problem = f"has given scales, which {kind} has no room for"
        remedy = f"use {', '.join(_HALVES)}"
        raise CheckpointError(Problem("tensor", name, problem, remedy))
    groups = array.reshape(-1, BLOCK)
    factors = shared_scales(name, scales.astype(np.float32).reshape(groups.shape))
    first = _HALVES[kind] or 128
    codes = codes_on_grid(
        name, groups, factors, lambda x: np.clip(np.rint(x), -first, first - 1)
    )
    with np.errstate(over="ignore"):
        stored = factors.astype(np.float16)
    if not (np.isfinite(stored) & (stored > 0)).all():
        problem = "has a scale that float16 does not hold"
        raise CheckpointError(Problem("tensor", name, problem, "use --format=hf"))
    parts = [stored[:, np.newaxis].view(np.uint8)]
    if kind == "q8_0":
        parts.append(codes.astype(np.int8).view(np.uint8))
    else:
        numbers = (codes + first).astype(np.uint8)
        if kind == "q5_0":
            parts.append(np.packbits(numbers >> 4, axis=-1, bitorder="little"))
        low, high = np.split(numbers & np.uint8(15), 2, axis=-1)
        parts.append(low | high << np.uint8(4))
    return np.concatenate(parts, -1).reshape(*array.shape[:-1], -1)


class Header:
    """Metadata and tensors of an open file, with all sizes checked.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is no GGUF file, is damaged, or is too large.
    """

    def __init__(self, path: pathlib.Path):
        self.file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.file)
        self._size = os.fstat(self.file).st_size
        self._most = min(self._size, MAX_INDEX_BYTES)
        self._text, self._place = bytearray(), 0
        if self._take(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        if (version := self._number("I")) not in (2, 3):
            raise ValueError(f"its version is {version}, and zjax reads 2 and 3")
        num_tensors, num_values = self._number("Q"), self._number("Q")
        self.metadata = dict[str, Any]()
        for _ in range(num_values):
            name = self._string()
            self.metadata[name] = self._value(self._number("I"))
        listed = [self._tensor() for _ in range(num_tensors)]
        align = self.metadata.get("general.alignment", 32)
        if type(align) is not int or align < 1 or align & (align - 1):
            raise ValueError(f"its alignment is {align}")
        start = -(-self._place // align) * align
        self.tensors = dict[str, Tensor]()
        for name, shape, kind, offset in listed:
            tensor = Tensor(shape, kind, start + offset)
            if name in self.tensors:
                raise ValueError(f"it has two tensors {name!r}")
            if tensor.offset + tensor.num_bytes > self._size:
                raise ValueError(f"it ends before {name!r}")
            self.tensors[name] = tensor
        self._text.clear()

    def _take(self, count: int) -> bytes:
        """Takes the next bytes of the header."""
        end = self._place + count
        if end > self._most:
            raise ValueError("it ends inside of the header, or the header is too long")
        while len(self._text) < end:
            some = os.pread(self.file, _PART_BYTES, len(self._text))
            if not some:
                raise OSError("it ended while it was read")
            self._text += some
        found = bytes(self._text[self._place : end])
        self._place = end
        return found

    def _number(self, code: str) -> Any:
        """Takes a number of a type of `struct`."""
        return struct.unpack(f"<{code}", self._take(struct.calcsize(code)))[0]

    def _string(self) -> str:
        """Takes a text with the length before it."""
        return self._take(self._number("Q")).decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        """Takes a value of metadata; numbers of 32 bits stay float32."""
        if kind == _FLOAT32:
            return np.float32(self._number("f"))
        if kind < len(_CODES) and (code := _CODES[kind]):
            return self._number(code)
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"it has metadata of the unknown type {kind}")
        inner, count = self._number("I"), self._number("Q")
        if inner == _ARRAY:
            raise ValueError("it has arrays of arrays")
        # An element takes a byte at least, so that a larger count cannot be true.
        if count > self._most:
            raise ValueError("it has an array longer than the header")
        return [self._value(inner) for _ in range(count)]

    def _tensor(self) -> tuple[str, tuple[int, ...], Any, int]:
        """Takes name, shape, type and offset of a tensor."""
        import gguf

        name, num_dims = self._string(), self._number("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise ValueError(f"it has {num_dims} dims in {name!r}")
        shape = tuple(self._number("Q") for _ in range(num_dims))[::-1]
        kind, offset = self._number("I"), self._number("Q")
        try:
            kind = gguf.GGMLQuantizationType(kind)
            gguf.quant_shape_to_byte_shape(shape, kind)
        except (ValueError, KeyError) as error:
            raise ValueError(f"it has {name!r} of a wrong type ({error})") from error
        return name, shape, kind, offset


_CODES = ("B", "b", "H", "h", "I", "i", "", "?", "", "", "Q", "q", "d")
"""Codes of `struct` by type of metadata."""
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_MAX_DIMS = 4
_PART_BYTES = 1 << 20
"""Bytes of a header that are read at once."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Place of a tensor in a file."""

    shape: tuple[int, ...]
    kind: Any
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row along the last dim."""
        import gguf

        return int(gguf.quant_shape_to_byte_shape(self.shape[-1:], self.kind)[0])

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape[:-1]) * self.row_bytes

    def read(self, file: int, index: Index) -> np.ndarray:
        """Reads a slice as float32, without bytes of other rows of dim 0."""
        import gguf

        rows, *others = index
        if len(self.shape) == 1:
            rows, others = slice(0, 1), [rows]
        inner = math.prod(self.shape[1:-1]) * self.row_bytes
        content = _read_exactly(
            file, self.offset + rows.start * inner, (rows.stop - rows.start) * inner
        )
        blocks = np.frombuffer(content, np.uint8).reshape(-1, self.row_bytes)
        values = gguf.dequantize(blocks, self.kind).astype(np.float32)
        if len(self.shape) == 1:
            return values.reshape(self.shape)[others[0]]
        shape = (rows.stop - rows.start, *self.shape[1:])
        return values.reshape(shape)[(slice(None), *others)]


def _read_exactly(file: int, offset: int, count: int) -> bytearray:
    """Reads bytes of an open file, in as many calls as it takes."""
    content = bytearray(count)
    view = memoryview(content)
    while view:
        size = os.preadv(file, [view], offset)
        if not size:
            raise OSError("the file ended while it was read")
        view, offset = view[size:], offset + size
    return content


def open_header(path: pathlib.Path) -> Header:
    """Opens a file; a CheckpointError says why it cannot be read."""
    check_installed("gguf")
    try:
        if fault := find_fault(path):
            raise OSError(fault)
        return Header(path)
    except (OSError, ValueError, UnicodeError) as error:
        problem = f"is not a readable GGUF file ({error})"
        raise CheckpointError(Problem(_FIELD, str(path), problem, _REMEDY)) from error


def report(given: str, path: pathlib.Path) -> None:
    """Warns on process 0 that quantised values become plain; names the types."""
    if jax.process_index() == 0:
        kinds = (x.kind.name for x in open_header(path).tensors.values())
        counts = collections.Counter(kinds)
        logging.warning(
            "checkpoint.init_from=%r has tensors in %s, which are restored while they "
            "are read: the run, its checkpoints and exports are plain",
            *(given, ", ".join(f"{name} ({n})" for name, n in counts.items())),
        )


def source_of(header: Header) -> Source:
    """Returns the tensors of a file, restored to float32, by name."""
    tensors = header.tensors
    entries = {name: Entry(x.shape, "float32") for name, x in tensors.items()}
    return Source(entries, lambda name, i: tensors[name].read(header.file, i))
