"""Writes arrays by name into safetensors files.

The file is a length, a JSON header and the tensors end to end. The safetensors library
needs all tensors at once; here the header comes from the entries and slices follow one
by one, so host memory holds one tensor.
"""

import contextlib
import json
import math
import pathlib
import struct
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
import numpy as np

from zjax.errors import CheckpointError, Problem
from zjax.files import new_directory
from zjax.weights.source import Entry, Index, Source, is_floating

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
"""Codes of safetensors, by dtype name."""


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
        size += _num_bytes(entry)
        if shards[-1] and size > max_bytes:
            shards.append({})
            size = _num_bytes(entry)
        shards[-1][name] = entry
    count, places = len(shards), dict[str, str]()
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors"
        if count > 1:
            file = f"model-{number:05}-of-{count:05}.safetensors"
        write_file(folder / file, Source(shard, source.read), metadata)
        places |= dict.fromkeys(shard, file)
    if count > 1:
        total = sum(map(_num_bytes, source.entries.values()))
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
    """Returns the safetensors name of an array: dots in place of slashes.

    Example:
        >>> tensor_name("blocks/0/kernel")
        'blocks.0.kernel'
    """
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
    step = max(1, _SLICE_BYTES * rows // max(1, _num_bytes(entry)))
    for first in range(0, rows, step):
        index = slice(first, min(first + step, rows)), *(slice(0, n) for n in others)
        yield index[: len(entry.shape)]


def _header(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """Returns the beginning of a file: the length of the header, and the header."""
    header: dict[str, object] = {"__metadata__": metadata}
    start = 0
    for name, entry in entries.items():
        end = start + _num_bytes(entry)
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


def _num_bytes(entry: Entry) -> int:
    return math.prod(entry.shape) * jnp.dtype(entry.dtype).itemsize
