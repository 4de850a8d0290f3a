"""Arrays by name, and names and shapes that do not depend on the mesh.

A name is the tree path of an array and a shape is unpadded, so checkpoints of equal
training states are equal whatever the devices, the ZeRO stage or the memory (following
Universal Checkpointing, arXiv:2406.18820). Split master weights are an exception.
"""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zjax.errors import CheckpointError, Problem
from zjax.sharding.naming import layer_of, path_of
from zjax.sharding.placement import ArrayPlan

_NUM_SHOWN = 5
"""Differences that an error lists; a wrong model differs in all arrays."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """Shape and dtype of one saved array.

    Args:
        shape: Unpadded shape.
        dtype: Name of the dtype.
        key_impl: Name of the PRNG implementation, for random keys.

    Example:
        >>> print(Entry((3, 4), "float32"))
        float32[3,4]
    """

    shape: tuple[int, ...]
    dtype: str
    key_impl: str = ""

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def is_empty(self) -> bool:
        """Whether the array has no elements; such an array is not stored."""
        return 0 in self.shape


Index = tuple[slice, ...]
"""One slice with both bounds per dim."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Arrays that are read by name, slice by slice."""

    entries: Mapping[str, Entry]
    read: Callable[[str, Index], np.ndarray]

    def read_all(self, name: str) -> np.ndarray:
        """Reads a whole array."""
        return self.read(name, tuple(slice(0, n) for n in self.entries[name].shape))

    def without(self, names: Collection[str]) -> "Source":
        """Returns the arrays but for some."""
        found = {n: e for n, e in self.entries.items() if n not in names}
        return Source(found, self.read)

    def renamed(self, names: Mapping[str, str]) -> "Source":
        """Returns some arrays by other names; `names` maps new names to names."""
        entries = {new: self.entries[name] for new, name in names.items()}
        return Source(entries, lambda new, index: self.read(names[new], index))

    def joined(self, other: "Source") -> "Source":
        """Returns the arrays of both; arrays of `other` replace arrays of a name."""

        def read(name: str, index: Index) -> np.ndarray:
            return (other if name in other.entries else self).read(name, index)

        return Source({**self.entries, **other.entries}, read)


def cached(source: Source) -> Source:
    """Returns the arrays, each cached as a whole until another array is read."""
    # One array, as two may not fit host memory.
    read_all = functools.lru_cache(maxsize=1)(source.read_all)
    return Source(source.entries, lambda name, index: read_all(name)[(..., *index)])


def name_leaves(tree: Any, part: str = "") -> dict[str, Any]:
    """Returns the leaves of a tree by path, each path with the prefix `part`."""
    prefix = f"{part}/" if part else ""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    named = {prefix + _name(keys): leaf for keys, leaf in pairs}
    if len(named) < len(pairs):
        raise CheckpointError(*_same_names(prefix, [keys for keys, _ in pairs]))
    return named


def _same_names(prefix: str, paths: Iterable[Any]) -> Iterable[Problem]:
    """Yields a problem for each pair of leaves with equal names."""
    seen: dict[str, Any] = {}
    for keys in paths:
        # A key with a slash, as in {"a/b": x}, meets the path of {"a": {"b": y}}.
        other = seen.setdefault(prefix + _name(keys), keys)
        if other is not keys:
            both = [jax.tree_util.keystr(path) for path in (other, keys)]
            problem = f"names two arrays, {' and '.join(both)}"
            remedy = "rename one of them, without a slash"
            yield Problem("checkpoint", prefix + _name(keys), problem, remedy)


def _name(keys: Any) -> str:
    """Name of a leaf: the path, with the layer's index in brackets."""
    layer = layer_of(keys)
    return path_of(keys) if layer is None else f"{path_of(keys)}[{layer}]"


def is_key(dtype: Any) -> bool:
    """Whether a NumPy or JAX dtype is the dtype of random keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def is_floating(dtype: str) -> bool:
    """Whether a dtype name is floating-point, bfloat16 and float8 included."""
    # NumPy's type hierarchy does not count bfloat16 and float8 as floating.
    return "float" in dtype


def describe_plans(named: Mapping[str, ArrayPlan]) -> dict[str, Entry]:
    """Returns unpadded shapes and dtypes of planned arrays, by name."""
    return {
        n: Entry(tuple(plan.shape), str(plan.stored_dtype)) for n, plan in named.items()
    }


def check_same(
    expected: Mapping[str, Entry],
    found: Mapping[str, Entry],
    place: str,
    *,
    cast: Collection[str] = (),
) -> None:
    """Raises if arrays differ in name, shape or dtype, but for floats of `cast`."""
    differences = [*_differences(expected, found, place, cast)]
    if not differences:
        return
    shown = differences[:_NUM_SHOWN]
    raise CheckpointError(
        *shown,
        Problem(
            "checkpoint",
            place,
            f"differs from this model in {len(differences)} arrays, "
            f"{len(shown)} of them shown",
            "use the configuration that wrote it, or another checkpoint",
        ),
    )


def _differences(
    expected: Mapping[str, Entry],
    found: Mapping[str, Entry],
    place: str,
    cast: Collection[str],
) -> Iterable[Problem]:
    """Yields a problem for each missing, unequal or unexpected array."""
    unused = [name for name in found if name not in expected]
    for name, entry in expected.items():
        if name not in found:
            close = difflib.get_close_matches(name, unused, n=1)
            remedy = (
                f"did you mean {close[0]}?"
                if close
                else "add it to the checkpoint, or remove it from the model"
            )
            yield Problem(name, str(entry), f"is missing from {place}", remedy)
        elif not _agree(entry, found[name], name in cast):
            problem = f"is {found[name]} in {place}"
            yield Problem(name, str(entry), problem, "make the two agree")
    for name in unused:
        problem = f"is in {place} but not in this model"
        yield Problem(
            name,
            str(found[name]),
            problem,
            "remove it from the checkpoint, or add it to the model",
        )


def _agree(expected: Entry, found: Entry, cast: bool) -> bool:
    """Whether shapes and dtypes agree; `cast` allows any two floating-point dtypes."""
    if expected.shape != found.shape:
        return False
    return expected.dtype == found.dtype or (
        cast and is_floating(expected.dtype) and is_floating(found.dtype)
    )
