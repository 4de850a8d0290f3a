"""Adapters of a checkpoint (LoRA, DoRA): merged, or newly initialised."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

import jax.numpy as jnp
import numpy as np

from zjax.ops.weights import column_lengths
from zjax.settings import schema
from zjax.weights import layers
from zjax.weights.source import Entry, Index, Source

_MATRIX = re.compile(r"(?P<layer>.+[./])lora[./](?P<matrix>a|b|magnitude)")

Drawn = Future[Mapping[str, np.ndarray]]
Initial = Callable[[Sequence[str]], Callable[[], Drawn]]
"""Function of array names. The first call of the returned function starts to draw these
arrays of a new model in a thread; a source makes that call in the first read, when no
check can refuse the checkpoint any more."""


def merged_kernel(
    kernel: np.ndarray, matrices: Mapping[str, np.ndarray], settings: schema.Lora
) -> np.ndarray:
    """Returns the float32 kernel, input dims first, of one layer with its adapter."""
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
    entries = {n: e for n, e in source.entries.items() if n in found}

    def read(name: str, index: Index) -> np.ndarray:
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

    return source.without(adapters).joined(Source(entries, read))


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
