"""Safetensors files: read slice by slice, written in one file or in shards.

The file is a length, a JSON header and the tensors end to end. The safetensors library
needs all tensors at once to write; here the header comes from the entries and slices
follow one by one, so host memory holds one tensor.
"""

import concurrent.futures
import contextlib
import functools
import json
import math
import os
import pathlib
import struct
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from zjax.errors import CheckpointError, Problem, check_installed, find_fault
from zjax.files import MAX_INDEX_BYTES, new_directory, parse_json, read_text
from zjax.weights.source import (
    Entry,
    Index,
    Source,
    is_floating,
)

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


_NAMES = {code: name for name, code in DTYPES.items()}
_LENGTH_BYTES = 8
"""Bytes before the header that hold the header's length."""
_PART_BYTES = 16 << 20
"""Bytes that a thread reads in one call."""
_NUM_THREADS = 8


class TensorFile:
    """Reads slices of an open file; the library has checked the header.

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


_SLICE_BYTES = 1 << 30
"""Most bytes that are read and cast at once, but for one index of dim 0."""


def write_file(path: pathlib.Path, source: Source, metadata: Mapping[str, str]) -> None:
    """Writes all arrays of a source into one file, slice by slice; does not sync."""
    with path.open("wb") as file:
        file.write(_header(source.entries, metadata))
        for name, entry in source.entries.items():
            for index in _slices_of(entry):
                values = np.ascontiguousarray(source.read(name, index))
                # As uint8, since bfloat16 has no buffer; flat, since a scalar has no
                # uint8 view.
                file.write(values.reshape(-1).view(np.uint8).data)


def write_shards(
    folder: pathlib.Path,
    source: Source,
    metadata: Mapping[str, str],
    max_bytes: int,
) -> None:
    """Writes shards of at most `max_bytes`, or of one tensor, and an index for many."""
    shards, size = list[dict[str, Entry]]([{}]), 0
    for name, entry in source.entries.items():
        size += num_bytes(entry)
        if shards[-1] and size > max_bytes:
            shards.append({})
            size = num_bytes(entry)
        shards[-1][name] = entry
    count, places = len(shards), dict[str, str]()
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors"
        if count > 1:
            file = f"model-{number:05}-of-{count:05}.safetensors"
        write_file(folder / file, Source(shard, source.read), metadata)
        places |= dict.fromkeys(shard, file)
    if count > 1:
        total = sum(map(num_bytes, source.entries.values()))
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_json(folder / "model.safetensors.index.json", index)


def write_json(path: pathlib.Path, values: Mapping[str, object]) -> None:
    """Writes a JSON file with the indents of transformers and PEFT."""
    path.write_text(json.dumps(values, indent=2) + "\n")


@contextlib.contextmanager
def new_folder(path: str) -> Iterator[pathlib.Path]:
    """Yields a folder that is renamed once complete, and removed on errors."""
    target = pathlib.Path(path)
    # An empty directory may be replaced.
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        problem, remedy = "exists and is not empty", "name a new directory"
        raise CheckpointError(Problem("output", path, problem, remedy))
    with writable(path), new_directory(target) as partial:
        yield partial


@contextlib.contextmanager
def writable(path: str) -> Iterator[None]:
    """Turns an error of the file system into a `CheckpointError` about an output."""
    try:
        yield
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        remedy = "name a file in a writable directory with free space"
        raise CheckpointError(Problem("output", path, problem, remedy)) from error


def tensor_name(name: str) -> str:
    """Returns the safetensors name of an array: dots in place of slashes."""
    return name.replace("/", ".")


def cast(source: Source, dtype: str) -> Source:
    """Casts floating-point arrays to `dtype`, or to no other dtype if empty.

    A CheckpointError names dtypes and names that safetensors does not have.
    """
    entries = {
        name: Entry(e.shape, dtype if dtype and is_floating(e.dtype) else e.dtype)
        for name, e in source.entries.items()
    }
    problems = []
    seen: dict[str, str] = {}
    for name, entry in entries.items():
        if entry.dtype not in DTYPES:
            remedy = f"export one of {', '.join(DTYPES)}"
            problem = "is not a dtype of safetensors"
            problems.append(Problem(name, entry.dtype, problem, remedy))
        other = seen.setdefault(tensor_name(name), name)
        if other != name:
            problem = f"has the same name in safetensors as {other}"
            problems.append(Problem(name, str(entry), problem, "rename one of them"))
    if problems:
        raise CheckpointError(*problems)

    def read(name: str, index: Index) -> np.ndarray:
        return source.read(name, index).astype(jnp.dtype(entries[name].dtype))

    return Source(entries, read)


def _slices_of(entry: Entry) -> Iterator[Index]:
    """Yields slices along dim 0 that cover an array."""
    rows, *others = entry.shape or (1,)
    step = max(1, _SLICE_BYTES * rows // max(1, num_bytes(entry)))
    for first in range(0, rows, step):
        index = slice(first, min(first + step, rows)), *(slice(0, n) for n in others)
        yield index[: len(entry.shape)]


def _header(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """Returns the beginning of a file: the length of the header, and the header."""
    header: dict[str, object] = {"__metadata__": metadata}
    start = 0
    for name, entry in entries.items():
        end = start + num_bytes(entry)
        header[tensor_name(name)] = {
            "dtype": DTYPES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": (start, end),
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # The format aligns tensors to 8 bytes by spaces at the end of the header.
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def num_bytes(entry: Entry) -> int:
    """Counts the bytes of an array in a file."""
    return math.prod(entry.shape) * jnp.dtype(entry.dtype).itemsize
