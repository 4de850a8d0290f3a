"""Adapters of a checkpoint (LoRA, DoRA), and kernels as codes and scales for QLoRA."""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np

from zjax.checkpoint import layers
from zjax.checkpoint.layers import Index, Source
from zjax.checkpoint.layout import Entry
from zjax.models.lora import column_lengths
from zjax.ops.quantized import dequantize, quantize
from zjax.settings import schema

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
        if kernel not in found:
            return matched.read(name, index)
        dim, size = _blocks(wanted[kernel], wanted[found[kernel]])
        is_scales = name in kernels
        inside = index[dim]
        first, last = inside.start, inside.stop
        if not is_scales:  # a scale needs the whole block
            first, last = first // size, -(-last // size)
        spans = (*index[:dim], slice(first * size, last * size), *index[dim + 1 :])
        with _on_host():
            both = quantize(
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

    there = {k: s for k, s in found.items() if k in matched.entries}
    changed = {n: wanted[n] for pair in there.items() for n in pair}
    return Source({**matched.entries, **changed}, read)


def without_codes(source: Source) -> Source:
    """Replaces codes and scales by kernels in the dtype of the scales."""
    found = _scales_of(source.entries)
    scales = {*found.values()}
    entries = {
        name: Entry(entry.shape, source.entries[found[name]].dtype)
        if name in found
        else entry
        for name, entry in source.entries.items()
        if name not in scales
    }

    def read(name: str, index: Index) -> np.ndarray:
        if name not in found:
            return source.read(name, index)
        dim, _ = _blocks(source.entries[name], source.entries[found[name]])
        # Whole along the blocked dim: a slice may begin or end inside a block.
        around = _whole(source.entries[name].shape, index, dim)
        blocks = _whole(source.entries[found[name]].shape, index, dim)
        with _on_host():
            codes = jax.numpy.asarray(source.read(name, around))
            factors = jax.numpy.asarray(source.read(found[name], blocks))
            kernel = np.asarray(dequantize(codes, factors))
        return kernel[(*[slice(None)] * dim, index[dim])]

    return Source(entries, read)


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


_MATRIX = re.compile(r"(?P<layer>.+[./])lora[./](?P<matrix>a|b|magnitude)")

Drawn = Future[Mapping[str, np.ndarray]]
Initial = Callable[[Sequence[str]], Callable[[], Drawn]]
"""Function of array names. The first call of the returned function starts to draw these
arrays of a new model in a thread; a source makes that call in the first read, when no
check can refuse the checkpoint any more."""


def merged_kernel(
    kernel: np.ndarray, matrices: Mapping[str, np.ndarray], settings: schema.Lora
) -> np.ndarray:
    """Returns the float32 kernel, input dims first, of one layer with its adapter.

    Example:
        >>> ones = {"a": np.ones((4, 2)), "b": np.ones((2, 3))}
        >>> settings = schema.Lora(rank=2, alpha=2.0)
        >>> merged_kernel(np.zeros((4, 3)), ones, settings).tolist()[0]
        [2.0, 2.0, 2.0]
    """
    a, b = (np.asarray(matrices[name], np.float32) for name in ("a", "b"))
    scale = np.float32(settings.alpha / settings.rank)
    total = np.asarray(kernel, np.float32) + scale * np.tensordot(a, b, 1)
    if settings.form == "lora":
        return total
    # DoRA has one magnitude per output, so lengths sum over all input dims.
    inputs = tuple(range(a.ndim - 1))
    lengths = column_lengths(np.sum(np.square(total), axis=inputs))
    return total * (np.asarray(matrices["magnitude"], np.float32) / lengths)


def adapter_names(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Names of adapter arrays, by kernel name and matrix (`a`, `b`, `magnitude`).

    Example:
        >>> adapter_names(["up/kernel", "up/lora/a"])
        {'up/kernel': {'a': 'up/lora/a'}}
    """
    found: dict[str, dict[str, str]] = {}
    for name in names:
        if match := _MATRIX.fullmatch(name):
            own = found.setdefault(f"{match['layer']}kernel", {})
            own[match["matrix"]] = name
    return found


def merged(source: Source, settings: schema.Lora) -> Source:
    """Returns the model without adapters: kernels are merged in float32 when read."""
    found = adapter_names(source.entries)
    adapters = {name for own in found.values() for name in own.values()}
    entries = {n: e for n, e in source.entries.items() if n not in adapters}

    def read(name: str, index: Index) -> np.ndarray:
        if name not in found:
            return source.read(name, index)
        depth = _num_stacked(name, found[name], source.entries)
        stack, inside = index[:depth], index[depth:]
        # Whole layers, even for a small slice: DoRA's column lengths need all inputs.
        arrays = {m: _of_stack(source, n, stack) for m, n in found[name].items()}
        kernels = _of_stack(source, name, stack)
        flat = (x.reshape(-1, *x.shape[depth:]) for x in arrays.values())
        each = zip(kernels.reshape(-1, *kernels.shape[depth:]), *flat, strict=True)
        total = [
            merged_kernel(kernel, dict(zip(arrays, own, strict=True)), settings)[inside]
            for kernel, *own in each
        ]
        shape = (*kernels.shape[:depth], *total[0].shape)
        return np.stack(total).reshape(shape).astype(jnp.dtype(entries[name].dtype))

    return Source(entries, read)


def with_adapters(
    source: Source, wanted: Mapping[str, Entry], compute_dtype: str, initial: Initial
) -> Source:
    """Adds newly initialised adapters where a checkpoint lacks wanted adapters.

    Magnitudes start as the column lengths of the kernels in the compute dtype.
    """
    wanted = layers.stack_all(wanted)
    found = adapter_names(wanted)
    names = {n: (k, m) for k, own in found.items() for m, n in own.items()}
    missing = {n: place for n, place in names.items() if n not in source.entries}
    if not missing:
        return source
    # Magnitudes are computed from the checkpoint's kernels, not drawn.
    drawn = [n for n, (_, matrix) in missing.items() if matrix != "magnitude"]
    draw = initial(drawn)
    stacked = layers.restacked(source, list(layers.stack_all(source.entries)))

    def lengths(name: str, index: Index) -> np.ndarray:
        kernel, _ = missing[name]
        depth = _num_stacked(kernel, found[kernel], wanted)
        count = len(wanted[kernel].shape) - len(wanted[name].shape)
        kernels = _of_stack(stacked, kernel, index[:depth])
        # The model measures columns of kernels in the compute dtype.
        kernels = kernels.astype(jnp.dtype(compute_dtype))
        dims = tuple(range(depth, depth + count))
        squares = np.square(kernels, dtype=np.float32)
        return np.sqrt(squares.sum(axis=dims))[(..., *index[depth:])]

    def read(name: str, index: Index) -> np.ndarray:
        # Called for every array: drawing overlaps with reading the base model.
        values = draw()
        if name not in missing:
            return source.read(name, index)
        is_length = missing[name][1] == "magnitude"
        return lengths(name, index) if is_length else values.result()[name][index]

    return Source({**source.entries, **{n: wanted[n] for n in missing}}, read)


def _num_stacked(
    kernel: str, own: Mapping[str, str], entries: Mapping[str, Entry]
) -> int:
    """Number of leading dims of a kernel that stack layers."""
    # a has stack + inputs + 1 dims, b has stack + 1 + outputs dims.
    a, b, whole = (len(entries[n].shape) for n in (own["a"], own["b"], kernel))
    return a + b - whole - 2


def _of_stack(source: Source, name: str, stack: Index) -> np.ndarray:
    """Reads an array for a slice of the stacked dims, whole along all other dims."""
    shape = source.entries[name].shape
    return source.read(name, (*stack, *(slice(0, n) for n in shape[len(stack) :])))
