"""Arrays that a loss expects in a batch, and checks of batches on host and devices."""

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zjax.errors import DataError, Problem
from zjax.sharding.activations import field_of
from zjax.sharding.naming import path_of
from zjax.typing import IGNORED, Batch, Entries, Entry


def entries_of(batch: Batch, *, replicated: Sequence[str] = ()) -> Entries:
    """Derives the arrays that a loss expects from an example batch.

    `replicated` are paths of arrays, or of dicts of arrays, without rows: every device
    and microbatch gets these arrays whole. Raises all problems at once.
    """
    # Rows are compared below, with all array names and the remedy `replicated`.
    batch = check_batch(batch, {}, rows_differ=True)
    entries, problems = {}, []
    leaves = {path_of(k): x for k, x in jax.tree_util.tree_leaves_with_path(batch)}
    for name in replicated:
        if not any(_is_within(path, name) for path in leaves):
            paths = ", ".join(leaves)
            problems.append(
                Problem(
                    "replicated", name, "is not in the batch", f"use any of {paths}"
                )
            )
    for path, leaf in leaves.items():
        is_replicated = not leaf.shape or any(_is_within(path, n) for n in replicated)
        shape = leaf.shape if is_replicated else ("B", *leaf.shape[1:])
        entries[path] = Entry(shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
    sizes = Counter(x.shape[0] for p, x in leaves.items() if entries[p].has_rows)
    if len(sizes) > 1:
        # The most common number of rows, and the largest of equally common numbers.
        common = max(sizes, key=lambda size: (sizes[size], size))
        problems += [
            Problem(
                field_of(path),
                _type_of(leaf),
                f"does not have the {common} rows of the others",
                f"give it as many, or name it in replicated=[{path!r}], which gives it "
                "to devices and microbatches whole",
            )
            for path, leaf in leaves.items()
            if entries[path].has_rows and leaf.shape[0] != common
        ]
    if problems:
        raise DataError(*problems)
    return entries


def check_batch(
    batch: Batch,
    entries: Entries,
    *,
    name: str = "batch",
    num_rows: int = 0,
    rows_differ: bool = False,
) -> Batch:
    """Refuses a batch that the loss does not expect.

    Returns the batch with NumPy arrays in the dtypes of JAX. Values are read of NumPy
    arrays only. Without entries, any numeric arrays pass; with `num_rows=0`, any number
    of rows that all arrays share. Raises all problems at once.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(batch, is_leaf=_is_list)
    leaves = {path_of(keys): _as_scalar(leaf) for keys, leaf in leaves}
    problems, arrays = [], {}
    for path, leaf in leaves.items():
        type_problem = _type_problem(field_of(path, name), leaf)
        if type_problem is None:
            arrays[path] = leaf if _is_placed(leaf) else _narrow(leaf)
        else:
            problems.append(type_problem)
    for path, entry in entries.items():
        if path not in leaves and not entry.is_optional:
            remedy = f"give {_expected(entry)}"
            problems.append(Problem(field_of(path, name), None, "is missing", remedy))
    for path, x in arrays.items():
        if entries and path not in entries:
            problem, remedy = "is not read by the loss", "leave it out"
            field = field_of(path, name)
            problems.append(Problem(field, _type_of(x), problem, remedy))
    known = {path: x for path, x in arrays.items() if path in entries or not entries}
    if not rows_differ:
        problems += _shape_problems(known, entries, name, num_rows)
    problems += [
        problem
        for path, x in known.items()
        if (problem := _host_value_problem(field_of(path, name), x, entries.get(path)))
    ]
    if problems:
        raise DataError(*problems)
    return jax.tree.unflatten(tree, [arrays[path] for path in leaves])


def _is_within(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}/")


def _is_list(node: Any) -> bool:
    """Whether a list or tuple stands for an array."""
    is_list = isinstance(node, list | tuple) and len(node) > 0
    return is_list and not any(hasattr(x, "shape") for x in jax.tree.leaves(node))


def _as_scalar(leaf: Any) -> Any:
    return np.asarray(leaf) if isinstance(leaf, bool | int | float) else leaf


def _is_placed(leaf: Any) -> bool:
    """Whether values must not be read: the array is on devices, or abstract."""
    return not isinstance(leaf, np.ndarray | np.generic)


def _type_of(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _type_problem(field: str, leaf: Any) -> Problem | None:
    """Problem of a leaf that is no numeric array, or does not fit JAX's dtypes."""
    known = np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct
    if not isinstance(leaf, known):
        kind = type(leaf).__name__
        return Problem(field, kind, "is not an array", "use numpy.asarray")
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return None
    if not any(jnp.issubdtype(leaf.dtype, kind) for kind in _KINDS):
        problem = "is not a dtype of numbers (text, or rows of unequal length)"
        remedy = "turn it into token ids and pad them, or remove it"
        return Problem(field, str(leaf.dtype), problem, remedy)
    # 64 bits become 32, unless jax_enable_x64 is set.
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    if leaf.dtype == dtype or leaf.size == 0:  # min() of nothing raises
        return None
    if jnp.issubdtype(dtype, jnp.floating):
        info, problem = jnp.finfo(dtype), f"does not fit {dtype}"
        # Infinity and NaN survive narrowing; only finite values can overflow.
        values = leaf[np.isfinite(leaf)]
    else:
        info, problem, values = jnp.iinfo(dtype), "does not fit 32 bits", leaf
    for value in (values.min(), values.max()) if values.size else ():
        if not info.min <= value <= info.max:
            return Problem(field, value.item(), problem, "renumber it or remove it")
    return None


_KINDS = np.integer, np.floating, np.bool_


def _narrow(array: Any) -> np.ndarray:
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    return np.asarray(array).astype(dtype, copy=False)


def _shape_problems(
    arrays: dict[str, Any], entries: Entries, name: str, num_rows: int
) -> Iterator[Problem]:
    """Yields problems of arrays that do not match an entry, or differ in size."""
    sizes: dict[tuple[str, bool], tuple[int, str]] = {}
    for path, x in arrays.items():
        entry, field = entries.get(path, Entry()), field_of(path, name)
        if not _matches(x, entry):
            problem, remedy = f"is not {_expected(entry)}", "give that shape and dtype"
            yield Problem(field, _type_of(x), problem, remedy)
            continue
        if entry.has_rows and x.shape and num_rows and x.shape[0] != num_rows:
            problem = f"has {x.shape[0]} rows, but global_batch_size={num_rows}"
            remedy = "make all batches that size and drop the last, partial one"
            yield Problem(field, _type_of(x), problem, remedy)
            continue
        if entry.has_rows and x.shape and not x.shape[0]:
            yield Problem(field, _type_of(x), "has no rows", "leave such batches out")
            continue
        for letter, size in zip(_letters(entry), x.shape, strict=False):
            # With several processes, a NumPy array may hold the rows of one process.
            is_part = letter == "B" and jax.process_count() > 1 and not _is_placed(x)
            other, of = sizes.setdefault((letter, is_part), (size, field))
            if letter and size != other:
                what = "rows" if letter == "B" else "columns"
                problem = f"does not have the {other} {what} of {of}"
                yield Problem(field, _type_of(x), problem, "give it as many")


def _letters(entry: Entry) -> Iterable[str]:
    shape = ("B",) if entry.shape is None else entry.shape
    return [dim if isinstance(dim, str) else "" for dim in shape]


def _matches(x: Any, entry: Entry) -> bool:
    """Whether an array has the dtype and shape of an entry."""
    if entry.dtype is not None and not jnp.issubdtype(x.dtype, entry.dtype):
        return False
    if entry.shape is None:
        return True
    pairs = zip(entry.shape, x.shape, strict=False)
    fits = all(isinstance(asked, str) or asked == size for asked, size in pairs)
    return fits and len(entry.shape) == len(x.shape)


def _expected(entry: Entry) -> str:
    """Describes the dtype and shape of an entry, such as `int32[B, L]`."""
    dtype, dims = entry.dtype, ""
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", "array")
    if entry.shape is not None:
        dims = f"[{', '.join(map(str, entry.shape))}]"
    return f"{name}{dims}"


def _host_value_problem(field: str, x: Any, entry: Entry | None) -> Problem | None:
    """Problem of the values of a NumPy array; None if in range or not on the host."""
    if entry is None or not _has_range(entry) or _is_placed(x) or not x.size:
        return None
    # Copies only if some value may be IGNORED.
    counted = x[x != IGNORED] if entry.may_be_ignored and x.min() < 0 else x
    if not counted.size:
        return None
    return _value_problem(field, counted.min().item(), counted.max().item(), entry)


def _has_range(entry: Entry) -> bool:
    return entry.num_ids > 0 or not entry.may_be_negative


def _value_problem(
    field: str, minimum: int | float, maximum: int | float, entry: Entry
) -> Problem | None:
    """Problem of the smallest and largest value; None if both are in range."""
    if not entry.num_ids:
        if not minimum < 0:
            return None
        return Problem(field, minimum, "is negative", "use 0 or more")
    if 0 <= minimum and maximum < entry.num_ids:
        return None
    problem, remedy = f"is no id of {entry.num_ids}", f"use 0 to {entry.num_ids - 1}"
    if entry.may_be_ignored:
        remedy += f", or {IGNORED} for ignored tokens"
    return Problem(field, int(minimum if minimum < 0 else maximum), problem, remedy)


def check_placed_values(batch: Batch, entries: Entries) -> None:
    """Refuses values out of range in arrays on devices; waits for the arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    arrays = {path_of(keys): x for keys, x in leaves}
    arrays = {
        p: x for p, x in arrays.items() if p in entries and _has_range(entries[p])
    }
    ignores = {path: entries[path].may_be_ignored for path in arrays}
    # One transfer for all arrays.
    ranges = jax.device_get(_ranges(arrays, tuple(ignores.items())))
    problems = [
        _value_problem(field_of(path), least.item(), most.item(), entries[path])
        for path, (least, most) in ranges.items()
    ]
    problems = [problem for problem in problems if problem]
    if problems:
        raise DataError(*problems)


# `ignores` is a tuple of pairs, as static arguments must be hashable.
@functools.partial(jax.jit, static_argnums=1)
def _ranges(arrays: dict[str, jax.Array], ignores: Any) -> Any:
    """Smallest and largest value of each array, ignored tokens as 0."""
    ignores = dict(ignores)

    def one(path: str, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = jnp.where((x == IGNORED) & ignores[path], 0, x)
        return x.min(), x.max()

    return {path: one(path, x) for path, x in arrays.items()}
