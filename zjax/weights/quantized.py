"""Kernels as codes and scales, for QLoRA."""

import contextlib
import re
from collections.abc import Iterator, Mapping

import jax
import numpy as np

from zjax.ops.quantized import dequantize, quantize
from zjax.weights import layers
from zjax.weights.source import Entry, Index, Source

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
            kernel = np.asarray(dequantize(codes, factors))
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
