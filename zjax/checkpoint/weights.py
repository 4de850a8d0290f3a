"""Imports weights of safetensors files and of runs; a device reads local slices."""

import concurrent.futures
import functools
import json
import math
import os
import pathlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zjax.checkpoint import layers, layout
from zjax.checkpoint.export import DTYPES, tensor_name
from zjax.checkpoint.layers import Index, Source
from zjax.checkpoint.layout import Entry
from zjax.checkpoint.model_state import open_weights
from zjax.checkpoint.pieces import Read, place_pieces
from zjax.checkpoint.steps import find_steps
from zjax.checkpoint.store import Store
from zjax.errors import CheckpointError, Problem, check_installed, find_fault
from zjax.files import MAX_INDEX_BYTES, local_path, parse_json, read_text
from zjax.sharding.placement import ArrayPlan
from zjax.typing import Params

_NAMES = {code: name for name, code in DTYPES.items()}
_LENGTH_BYTES = 8
"""Bytes before the header that hold the header's length."""
_PART_BYTES = 16 << 20
"""Bytes that a thread reads in one call."""
_NUM_THREADS = 8


class TensorFile:
    """Reads slices of an open file; the library has checked the header.

    Args:
        path: File that the safetensors library can open.

    Raises:
        OSError: The file cannot be opened.
        ValueError: The header is larger than an index may be.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path, self._file = path, os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        length = int.from_bytes(os.read(self._file, _LENGTH_BYTES), "little")
        if length > MAX_INDEX_BYTES:
            raise ValueError(f"its header has more than {MAX_INDEX_BYTES:,} bytes")
        self._data_start = _LENGTH_BYTES + length
        text = bytearray(length)
        self._fill(memoryview(text), _LENGTH_BYTES)
        header = json.loads(text)
        self._header = {k: v for k, v in header.items() if k != "__metadata__"}

    @functools.cached_property
    def entries(self) -> Mapping[str, Entry]:
        """Shapes and dtypes by name; a dtype without NumPy name is given as code."""
        return {
            name: Entry(tuple(x["shape"]), _NAMES.get(x["dtype"], f"{x['dtype']}"))
            for name, x in self._header.items()
        }

    def read(self, name: str, index: Index) -> np.ndarray:
        """Reads a slice of a tensor, without bytes of other rows of dim 0."""
        shape, dtype = self.entries[name].shape, jnp.dtype(self.entries[name].dtype)
        first, start = self._header[name]["data_offsets"][0], 0
        if shape:
            rows, *others = index
            row_bytes = math.prod(shape[1:]) * dtype.itemsize
            start, shape = rows.start * row_bytes, (rows.stop - rows.start, *shape[1:])
            index = (slice(None), *others)
        found = np.empty(shape, dtype)
        content: Any = found.reshape(-1).view(np.uint8)
        self._fill(memoryview(content), self._data_start + first + start)
        return found[index]

    def _fill(self, content: memoryview, offset: int) -> None:
        """Reads file bytes into a buffer, in parallel parts."""

        def read(start: int) -> None:
            part = content[start : start + _PART_BYTES]
            while part:
                # Threads share the file without a position; may read less than asked.
                count = os.preadv(self._file, [part], offset + start)
                if not count:
                    raise OSError(f"{self._path} ended while it was read")
                part, start = part[count:], start + count

        starts = range(0, len(content), _PART_BYTES)
        run = _threads().map if len(starts) > 1 else map
        # Consumed, as `map` raises errors of threads with the results.
        for _ in run(read, starts):
            pass


@functools.cache
def _threads() -> concurrent.futures.Executor:
    return concurrent.futures.ThreadPoolExecutor(_NUM_THREADS, "tensor-file")


_REMEDY = (
    "give a .safetensors file, a directory with one or with an index, or the directory "
    "of a run"
)
Adapt = Callable[[Source, Mapping[str, Entry]], Source]
"""Function of a source and the expected entries that renames or converts arrays."""


def _unchanged(source: Source, expected: Mapping[str, Entry]) -> Source:
    return source


def load_weights(path: str, plans: Any, adapt: Adapt = _unchanged) -> Params:
    """Reads weights straight onto shards, in the structure and dtypes of `plans`.

    `path` names a safetensors file, a directory with one file or an index, or a run,
    which gives the newest weights for evaluation. Tensor names are paths with dots.
    """
    wanted = _match(open_source(path), plans, path, adapt)
    # Large arrays first: meanwhile a thread draws small arrays that no checkpoint
    # holds, such as adapters.
    order = sorted(range(len(wanted)), key=lambda i: -wanted[i][1].device_bytes)
    placed = zip(order, place_pieces([wanted[i] for i in order]), strict=True)
    return jax.tree.unflatten(
        jax.tree.structure(plans),
        [x for _, x in sorted(placed, key=lambda pair: pair[0])],
    )


def iter_weights(path: str, plans: Any, adapt: Adapt = _unchanged) -> Iterator[Any]:
    """Yields weights one by one, in the order of `plans`; see `load_weights`.

    Names and shapes are checked at the call, before the first array is asked for.
    """
    return place_weights(open_source(path), plans, path, adapt)


def place_weights(
    source: Source, plans: Any, path: str, adapt: Adapt = _unchanged
) -> Iterator[Any]:
    """Yields weights of an open source; `path` is for messages."""
    return place_pieces(_match(source, plans, path, adapt))


def _match(
    source: Source, plans: Any, path: str, adapt: Adapt
) -> list[tuple[Read, ArrayPlan]]:
    """Returns a slice reader and the plan of each array, after a check of all names."""
    named = {tensor_name(name): r for name, r in layout.name_leaves(plans).items()}
    expected = layout.describe_plans(named)
    found = layers.match_layout(adapt(source, expected), expected)
    layout.check_same(expected, found.entries, path, cast=expected)
    return [(functools.partial(found.read, name), plan) for name, plan in named.items()]


def open_source(path: str) -> Source:
    """Opens safetensors files or a run, by tensor name."""
    place = pathlib.Path(local_path("checkpoint.init_from", path, CheckpointError))
    steps = find_steps(place)
    if steps is None:
        return _make_source(_find_tensors(path, place))
    return open_run(Store(str(steps)))


def open_run(store: Store) -> Source:
    """Opens the newest weights of a run for evaluation, by tensor name."""
    source, _ = open_weights(store)
    names = {tensor_name(name): name for name in source.entries}
    return layers.cached(
        Source(
            {name: source.entries[saved] for name, saved in names.items()},
            lambda name, index: source.read(names[name], index),
        )
    )


def _make_source(files: Mapping[str, TensorFile]) -> Source:
    """Combines open files into one source."""
    entries = {name: file.entries[name] for name, file in files.items()}
    return Source(entries, lambda name, index: files[name].read(name, index))


def _find_tensors(path: str, place: pathlib.Path) -> dict[str, TensorFile]:
    """Opens the file of each tensor, by tensor name."""
    check_installed("safetensors")
    if place.is_dir():
        indices = sorted(place.glob("*.safetensors.index.json"))
        files = sorted(place.glob("*.safetensors"))
        if len(indices) == 1:
            return _read_index(indices[0])
        if indices or len(files) != 1:
            raise _unusable(
                path, f"holds {len(files)} safetensors files and {len(indices)} indices"
            )
        place = files[0]
    if fault := find_fault(place):
        raise _unusable(path, fault)
    file = _open(place)
    return dict.fromkeys(file.entries, file)


def _read_index(index: pathlib.Path) -> dict[str, TensorFile]:
    """Opens the files that a safetensors index names, by tensor name."""
    try:
        weight_map = parse_json(read_text(index, MAX_INDEX_BYTES))["weight_map"]
        paths = {name: index.parent / file for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"is not an index of safetensors ({type(error).__name__}: {error})"
        raise _unusable(str(index), problem) from error
    for name, file in weight_map.items():
        # An index must not make zjax read files outside of the directory.
        place = pathlib.PurePath(file)
        if place.is_absolute() or ".." in place.parts:
            raise _unusable(str(index), f"names {file} for {name}, which is elsewhere")
    files = _open_all(sorted(set(paths.values())))
    if problems := [*_disagreements(index, paths, files)]:
        raise CheckpointError(*problems)
    return {name: files[path] for name, path in paths.items()}


def _open_all(paths: Sequence[pathlib.Path]) -> dict[pathlib.Path, TensorFile]:
    """Opens all files, and raises the problems of all of the unreadable files."""
    files, problems = {}, list[Problem]()
    for path in paths:
        try:
            files[path] = _open(path)
        except CheckpointError as error:
            problems += error.problems
    if problems:
        raise CheckpointError(*problems)
    return files


def _disagreements(
    index: pathlib.Path,
    paths: Mapping[str, pathlib.Path],
    files: Mapping[pathlib.Path, TensorFile],
) -> Iterator[Problem]:
    """Yields a problem for each tensor that the index or the named file lacks."""
    held = {path: set(file.entries) for path, file in files.items()}
    for name, path in paths.items():
        if name not in held[path]:
            problem = f"names {name}, which {path} lacks"
            yield Problem("checkpoint.init_from", str(index), problem, _REMEDY)
    for path, names in held.items():
        for name in sorted(names - paths.keys()):
            problem = f"does not name {name}, which {path} holds"
            yield Problem("checkpoint.init_from", str(index), problem, _REMEDY)


def open_file(path: pathlib.Path, field: str, remedy: str) -> TensorFile:
    """Opens a safetensors file after the library has checked the header."""
    check_installed("safetensors")
    from safetensors import SafetensorError, safe_open

    try:
        if fault := find_fault(path):
            raise OSError(f"{path} {fault}")
        # Checks the offsets, which `TensorFile` trusts.
        with safe_open(path, framework="numpy"):
            return TensorFile(path)
    except (OSError, ValueError, SafetensorError) as error:
        problem = f"is not a readable safetensors file ({error})"
        raise CheckpointError(Problem(field, str(path), problem, remedy)) from error


def _open(path: pathlib.Path) -> TensorFile:
    return open_file(path, "checkpoint.init_from", _REMEDY)


def _unusable(path: str, problem: str) -> CheckpointError:
    return CheckpointError(Problem("checkpoint.init_from", path, problem, _REMEDY))
