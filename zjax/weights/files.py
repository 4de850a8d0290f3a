"""Reads slices of safetensors files, by tensor name."""

import concurrent.futures
import functools
import json
import math
import os
import pathlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from zjax.errors import CheckpointError, Problem, check_installed, find_fault
from zjax.files import MAX_INDEX_BYTES, parse_json, read_text
from zjax.weights.source import (
    Entry,
    Index,
    Source,
)
from zjax.weights.write import DTYPES

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


def open_files(path: str, place: pathlib.Path) -> Source:
    """Opens a safetensors file, or a directory with one or with an index."""
    files = _find_tensors(path, place)
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
