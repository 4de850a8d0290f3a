"""Arrays stored as codes and scales: FP8, MXFP4, compressed-tensors, QLoRA."""

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from zjax.errors import CheckpointError, Problem
from zjax.ops.rounding import dequantize_blocks, quantize_blocks
from zjax.weights import compressed_tensors as compressed
from zjax.weights import layers
from zjax.weights.blocks import blocks_of, inside, num_blocks, spread
from zjax.weights.family import Fault
from zjax.weights.source import Entry, Index, Source

Read = Callable[[Index], np.ndarray]
"""Function that reads a slice of one tensor."""


@dataclasses.dataclass(frozen=True)
class Fp8:
    """Codes of 8 bits, with a scale for each block of a matrix.

    Values are rounded once, to float32. NaN codes give NaN.

    Args:
        block: Outputs and inputs of a block; the last blocks of a matrix may be
            smaller.
    """

    block: tuple[int, int] = (128, 128)
    method: ClassVar = "fp8"
    endings: ClassVar = ("", "_scale_inv")
    """Endings of the names of codes and of scales."""
    dtype: ClassVar = "float32"
    """Dtype of plain values."""

    def holds(self, name: str, entry: Entry, stored: Mapping[str, Entry]) -> bool:
        """Whether a tensor is stored as codes."""
        # By dtype: some matrices of a quantised checkpoint are plain.
        return name in stored and stored[name].dtype == "float8_e4m3fn"

    def entries(self, shape: tuple[int, ...]) -> tuple[Entry, Entry]:
        """Codes and scales that store a tensor of a plain shape."""
        blocks = map(num_blocks, shape, self._sizes(len(shape)))
        return Entry(shape, "float8_e4m3fn"), Entry(tuple(blocks), "float32")

    def read(self, index: Index, codes: Read, scales: Read) -> np.ndarray:
        """Reads a slice of plain values from functions that read codes and scales."""
        sizes = self._sizes(len(index))
        # Scales may have 16 bits in the file.
        factors = scales(tuple(map(blocks_of, index, sizes))).astype(np.float32)
        *outer, length = factors.shape
        factors = factors.reshape(math.prod(outer), length)
        factors = spread(factors, 1, index[-1], sizes[-1])
        # Indices of rows take less memory than repeated factors.
        numbers = np.arange(len(factors)).reshape(outer)  # the factors of each row
        for dim, size in enumerate(sizes[:-1]):
            numbers = spread(numbers, dim, index[dim], size)
        numbers = numbers.reshape(-1)
        stored = codes(index).view(np.uint8)
        rows = stored.reshape(numbers.size, factors.shape[1])
        values = np.empty(rows.shape, np.float32)
        # In chunks: indices into the table take 8 bytes for each code of 1 byte.
        for some in _chunks(*rows.shape):
            plain = _float8_values()[rows[some]]
            # Into `values`, without a further array of the size of the slice.
            np.multiply(plain, factors[numbers[some]], out=values[some])
        return values.reshape(stored.shape)

    def _sizes(self, num_dims: int) -> tuple[int, ...]:
        """Elements of a block along each dim."""
        # Dims before a matrix, such as experts, have a scale per element.
        return (*[1] * (num_dims - 2), *self.block)[-num_dims:]


@dataclasses.dataclass(frozen=True)
class Mxfp4:
    """Codes of 4 bits, two in a byte, with a power of two for each 32 inputs.

    Stored matrices of experts are transposed. Values are exact in bfloat16, except
    values beyond the largest bfloat16, which become infinite. The scale 255 is NaN.
    """

    method: ClassVar = "mxfp4"
    endings: ClassVar = ("_blocks", "_scales")
    dtype: ClassVar = "bfloat16"

    def holds(self, name: str, entry: Entry, stored: Mapping[str, Entry]) -> bool:
        """Whether codes or scales of experts are stored in place of a plain tensor."""
        is_stored = any(f"{name}{ending}" in stored for ending in self.endings)
        return is_stored and len(entry.shape) == 3

    def entries(self, shape: tuple[int, ...]) -> tuple[Entry, Entry]:
        """Codes and scales that store a tensor [experts, inputs, outputs]."""
        experts, inputs, outputs = shape
        blocks = experts, outputs, num_blocks(inputs, _MX_BLOCK)
        return Entry((*blocks, _MX_BLOCK // 2), "uint8"), Entry(blocks, "uint8")

    def read(self, index: Index, codes: Read, scales: Read) -> np.ndarray:
        """Reads a slice of plain values, as a transposed view of file order."""
        experts, inputs, outputs = index
        blocks = experts, outputs, blocks_of(inputs, _MX_BLOCK)
        low = codes((*blocks, slice(0, _MX_BLOCK // 2)))
        *shape, num_blocks, num_bytes = low.shape
        low, high = low.reshape(-1, num_bytes), scales(blocks).reshape(-1, 1)
        values = np.empty(low.shape, np.uint32)
        for some in _chunks(*low.shape):
            # One lookup gives both values of a byte, with the scale applied.
            pairs = high[some].astype(np.uint16) << 8 | low[some]
            values[some] = _mx_values()[pairs]
        values = values.view(jnp.bfloat16).reshape(*shape, num_blocks * _MX_BLOCK)
        return values[..., inside(inputs, _MX_BLOCK)].swapaxes(1, 2)


@dataclasses.dataclass(frozen=True)
class CompressedTensors:
    """Codes of 4 or 8 bits, with a scale for each output or each group of inputs."""

    scheme: compressed.Scheme
    method: ClassVar = compressed.METHOD
    dtype: ClassVar = "float32"

    @property
    def endings(self) -> tuple[str, ...]:
        """Endings of the names of codes, of scales, and of shapes."""
        return self.scheme.endings

    def holds(self, name: str, entry: Entry, stored: Mapping[str, Entry]) -> bool:
        """Whether a matrix is stored as codes."""
        found = stored.get(f"{name}{self.endings[0]}")
        # By dtype: modules of `ignore` are plain.
        dtype = "int32" if self.scheme.is_packed else self.scheme.dtype
        return found is not None and found.dtype == dtype and len(entry.shape) == 2

    def entries(self, shape: tuple[int, ...]) -> tuple[Entry, ...]:
        """Codes, scales and perhaps a shape that store a matrix of a plain shape."""
        return self.scheme.entries(shape, "float32")

    def read(self, index: Index, codes: Read, scales: Read) -> np.ndarray:
        """Reads a slice of plain values from functions that read codes and scales."""
        (rows, inputs), step = index, self.scheme.per_word
        stored = codes((rows, blocks_of(inputs, step)))
        values = self.scheme.restore(stored, stored.shape[1] * step)
        values = values[:, inside(inputs, step)]
        if not (group := self.scheme.group):
            return values * scales((rows, slice(0, 1))).astype(np.float32)
        factors = scales((rows, blocks_of(inputs, group))).astype(np.float32)
        return values * spread(factors, 1, inputs, group)


Format = Fp8 | Mxfp4 | CompressedTensors
_CHUNK = 2**17
"""Codes that are looked up at once."""
_MX_BLOCK = 32
"""Inputs per scale."""
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the codes 0 to 7; the highest bit of a code is the sign."""


def _chunks(num_rows: int, length: int) -> Iterator[slice]:
    """Splits rows into chunks that fit a cache."""
    step = max(1, _CHUNK // max(1, length))
    return (slice(first, first + step) for first in range(0, num_rows, step))


@functools.cache
def _float8_values() -> np.ndarray:
    """Values of all codes, float32[256]."""
    return np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)


@functools.cache
def _mx_values() -> np.ndarray:
    """Pairs of bfloat16 values, as uint32, by `scale * 256 + byte`.

    The low half of a byte comes first.
    """
    halves = np.array([*_FP4, *(-x for x in _FP4)], np.float32)
    byte = np.arange(256)
    pairs = np.stack([halves[byte & 15], halves[byte >> 4]], -1)
    # Scales are exponents with a bias of 127, without a sign.
    exponents = np.arange(256)[:, np.newaxis, np.newaxis] - 127
    # Values beyond bfloat16 become infinite on purpose.
    with np.errstate(over="ignore"):
        values = np.ldexp(pairs, exponents)
    values[255] = np.nan
    return values.astype(jnp.bfloat16).reshape(-1).view(np.uint32)


KEY = "quantization_config"
_METHOD, _BLOCK = "quant_method", "weight_block_size"
_FIXED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    Mxfp4.method: {},
    Fp8.method: {
        "activation_scheme": ("dynamic",),
        "fmt": ("e4m3",),
        "scale_fmt": ("float", "ue8m0", None),
        "expert_dtype": ("fp8",),
    },
    compressed.METHOD: compressed.FIXED,
}
"""Accepted values of keys by method; the first value is the default."""
_UNREAD = frozenset(
    """
    modules_to_not_convert ignored_layers modules_to_convert dequantize
    """.split()
)
"""Keys that repeat facts of the tensors, or say how to load a checkpoint."""
_REMEDY = "use a checkpoint of plain weights, such as one saved in bfloat16"


def quantization_faults(values: Mapping[str, Any]) -> Iterator[Fault]:
    """Yields parts of the quantisation of a config.json that zjax does not read."""
    found = values.get(KEY)
    if found is None:
        return
    if not isinstance(found, dict):
        yield Fault(KEY, found, "is not an object")
        return
    method = found.get(_METHOD)
    if not isinstance(method, str) or method not in _FIXED:
        *names, last = _FIXED
        yield _not_read(_METHOD, method, f"{', '.join(names)} and {last}")
        return
    for name, accepted in _FIXED[method].items():
        if (value := found.get(name, accepted[0])) not in accepted:
            yield _not_read(name, value, " or ".join(map(repr, accepted)))
    if method == compressed.METHOD:
        for name, value in compressed.unread_parts(found):
            yield _not_read(name, value, "symmetric codes of one group of modules")
    if method == Fp8.method and not _is_block(found.get(_BLOCK, Fp8.block)):
        yield _not_read(_BLOCK, found[_BLOCK], "two sizes")


def unknown_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys, without known meaning, of a quantisation without problems."""
    found = values.get(KEY) or {}
    known = {_METHOD, *_UNREAD, *_FIXED.get(found.get(_METHOD, ""), ())}
    known |= {_BLOCK} if found.get(_METHOD) == Fp8.method else set()
    known |= compressed.KNOWN if found.get(_METHOD) == compressed.METHOD else set()
    return {f"{KEY}.{name}": x for name, x in found.items() if name not in known}


@dataclasses.dataclass(frozen=True)
class Quantized:
    """Lists the tensors of a checkpoint that are stored as codes and scales.

    Args:
        shapes: Plain shapes of quantised tensors, by name.
    """

    format: Format | None
    shapes: Mapping[str, tuple[int, ...]]

    def stored(self, plain: Mapping[str, Entry]) -> dict[str, Entry]:
        """Entries that a file holds for plain tensors."""
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
        """Returns a source that reads quantised tensors as plain tensors."""
        form = self.format
        if form is None or not self.shapes:
            return source

        def read(name: str, index: Index) -> np.ndarray:
            codes, scales = (f"{name}{ending}" for ending in form.endings[:2])
            return form.read(
                index,
                lambda index: source.read(codes, index),
                lambda index: source.read(scales, index),
            )

        plain = {name: Entry(x, form.dtype) for name, x in self.shapes.items()}
        return source.joined(Source(plain, read))

    def report(self, path: str) -> None:
        """Warns on process 0 that quantised values become plain."""
        if self.format is not None and self.shapes and jax.process_index() == 0:
            logging.warning(
                "checkpoint.init_from=%r has %d tensors in %s, which are dequantised "
                "while they are read: the run, its checkpoints and exports are plain",
                *(path, len(self.shapes), self.format.method),
            )


def find_quantized(
    values: Mapping[str, Any], plain: Mapping[str, Entry], source: Source
) -> Quantized:
    """Finds the quantised tensors of a checkpoint."""
    found = values.get(KEY)
    if found is None:
        return Quantized(None, {})
    form: Format = Mxfp4()
    if found[_METHOD] == Fp8.method:
        form = Fp8(tuple(found.get(_BLOCK, Fp8.block)))
    elif found[_METHOD] == compressed.METHOD:
        form = CompressedTensors(compressed.scheme_of(found))
    shapes = {
        name: entry.shape
        for name, entry in plain.items()
        if form.holds(name, entry, source.entries)
    }
    if isinstance(form, CompressedTensors) and form.scheme.is_packed:
        _check_shapes(source, shapes)
    return Quantized(form, shapes)


def _check_shapes(source: Source, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses packed matrices whose stored shape is another one."""
    problems = list[Problem]()
    for name, shape in shapes.items():
        stored = f"{name}_shape"
        entry = source.entries.get(stored)
        if entry is None or entry.shape != (len(shape),):
            continue  # reported with all tensors that are missing or differ
        if (found := tuple(source.read_all(stored).tolist())) != shape:
            problem = f"is not the {shape} of this model"
            problems.append(Problem(stored, found, problem, "use another checkpoint"))
    if problems:
        raise CheckpointError(*problems)


def _is_block(sizes: Any) -> bool:
    """Whether a value is two positive sizes."""
    return (
        isinstance(sizes, list | tuple)
        and len(sizes) == len(Fp8.block)
        and all(type(x) is int and x > 0 for x in sizes)
    )


def _not_read(name: str, value: Any, what: str) -> Fault:
    problem = f"is not supported: zjax reads {what} alone"
    return Fault(f"{KEY}.{name}", value, problem, _REMEDY)


_SCALES = re.compile(r"(?P<layer>.+[./])scales")


def with_codes(source: Source, wanted: Mapping[str, Entry]) -> Source:
    """Quantises kernels on the host, slice by slice, where a model wants codes."""
    found = _scales_of(wanted)
    if not found:
        return source
    kernels = {scales: kernel for kernel, scales in found.items()}
    plain = {name: entry for name, entry in wanted.items() if name not in kernels}
    matched = layers.match_layout(source, plain)

    def read(name: str, index: Index) -> np.ndarray:
        kernel = kernels.get(name, name)
        dim, size = _blocks(wanted[kernel], wanted[found[kernel]])
        is_scales = name in kernels
        inside = index[dim]
        first, last = inside.start, inside.stop
        if not is_scales:  # a scale needs the whole block
            first, last = first // size, -(-last // size)
        spans = (*index[:dim], slice(first * size, last * size), *index[dim + 1 :])
        with _on_host():
            both = quantize_blocks(
                jax.numpy.asarray(matched.read(kernel, spans)),
                dim,
                size,
                wanted[kernel].dtype,
            )
            codes, scales = map(np.asarray, both)
        if is_scales:
            return scales
        start = inside.start - first * size
        local = slice(start, start + inside.stop - inside.start)
        return codes[(*[slice(None)] * dim, local)]

    pairs = (pair for pair in found.items() if pair[0] in matched.entries)
    coded = {name: wanted[name] for pair in pairs for name in pair}
    return matched.joined(Source(coded, read))


def without_codes(source: Source) -> Source:
    """Replaces codes and scales by kernels in the dtype of the scales."""
    found, entries = _scales_of(source.entries), source.entries

    def read(name: str, index: Index) -> np.ndarray:
        dim, _ = _blocks(entries[name], entries[found[name]])
        # Whole along the blocked dim: a slice may begin or end inside a block.
        around = _whole(entries[name].shape, index, dim)
        blocks = _whole(entries[found[name]].shape, index, dim)
        with _on_host():
            codes = jax.numpy.asarray(source.read(name, around))
            factors = jax.numpy.asarray(source.read(found[name], blocks))
            kernel = np.asarray(dequantize_blocks(codes, factors))
        return kernel[(*[slice(None)] * dim, index[dim])]

    plain = {k: Entry(entries[k].shape, entries[s].dtype) for k, s in found.items()}
    return source.without({*found.values()}).joined(Source(plain, read))


def _scales_of(entries: Mapping[str, Entry]) -> dict[str, str]:
    """Names of scales, by name of a kernel that holds integer codes."""
    found = {f"{m['layer']}kernel": n for n in entries if (m := _SCALES.fullmatch(n))}
    return {
        kernel: scales
        for kernel, scales in found.items()
        if kernel in entries and "int" in f"{entries[kernel].dtype}"
    }


def _blocks(kernel: Entry, scales: Entry) -> tuple[int, int]:
    """Dim of a kernel along which blocks share scales, and size of a block."""
    pairs = zip(kernel.shape, scales.shape, strict=True)
    dim = next((i for i, (n, number) in enumerate(pairs) if n != number), 0)
    return dim, kernel.shape[dim] // scales.shape[dim]


def _whole(shape: tuple[int, ...], index: Index, dim: int) -> Index:
    """Extends one dim of an index to the whole array."""
    return (*index[:dim], slice(0, shape[dim]), *index[dim + 1 :])


@contextlib.contextmanager
def _on_host() -> Iterator[None]:
    """Computes on the host, or on the first device where JAX has no CPU backend."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        device = jax.local_devices()[0]
    with jax.default_device(device):
        yield
