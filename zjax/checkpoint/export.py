"""Exports the weights of a checkpoint as one safetensors file.

The file is a length, a JSON header and the tensors end to end. The safetensors library
needs all tensors at once; here the header comes from the checkpoint's index and tensors
follow one by one, so host memory holds one tensor.
"""

import json
import math
import pathlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO

import jax.numpy as jnp
import numpy as np

from zjax.checkpoint import layers
from zjax.checkpoint.layout import Entry, is_floating
from zjax.checkpoint.model_state import open_weights
from zjax.checkpoint.store import Store
from zjax.errors import CheckpointError, Problem
from zjax.files import new_file

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


def export_safetensors(
    store: Store,
    path: str,
    *,
    part: str = "auto",
    step: int | None = None,
    dtype: str = "",
) -> int:
    """Writes the weights of a checkpoint, frozen and tied arrays included, to one file.

    The file is renamed once complete. Only one process may call this.

    Args:
        store: Checkpoints of a run.
        path: Output file; an existing one is replaced.
        part: Kind of weights: `raw`, `ema` or `schedule_free`; `auto` prefers averaged
            weights.
        step: Step of the checkpoint; None for the newest.
        dtype: `float32`, `bfloat16` or `float16` for floating-point arrays; empty for
            the saved dtype.

    Returns:
        Bytes written.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, a dtype or two
            names do not fit the format, or the file cannot be written.
        ConfigError: The checkpoint does not hold that part.
    """
    step = store.latest() if step is None else step
    source, part = open_weights(store, part, step)
    found = layers.retiled(source, 1)
    entries = cast_entries(layers.stack_all(found.entries), dtype)
    metadata = {"format": "flax", "part": part, "step": str(step)}

    def read(name: str) -> Iterator[np.ndarray]:
        return map(found.read_all, layers.sources_of(name, found.entries))

    target = pathlib.Path(path)
    try:
        with new_file(target) as partial:
            write_file(partial, entries, metadata, read)
    except OSError as error:
        raise unwritable(path, error) from error
    return target.stat().st_size


def write_file(
    path: pathlib.Path,
    entries: Mapping[str, Entry],
    metadata: Mapping[str, str],
    read: Callable[[str], Iterable[np.ndarray]],
) -> None:
    """Writes one file from the parts of one array at a time; does not sync."""
    with path.open("wb") as file:
        file.write(_header(entries, metadata))
        for name, entry in entries.items():
            for array in read(name):
                _write(file, array, entry.dtype)


def unwritable(path: str, error: OSError) -> CheckpointError:
    """Returns the error for an output that the file system refuses."""
    problem = f"cannot be written ({error.strerror})"
    remedy = "name a file in a writable directory with free space"
    return CheckpointError(Problem("output", path, problem, remedy))


def tensor_name(name: str) -> str:
    """Returns the safetensors name of an array: dots in place of slashes.

    Example:
        >>> tensor_name("blocks/0/kernel")
        'blocks.0.kernel'
    """
    return name.replace("/", ".")


def _write(file: IO[bytes], array: np.ndarray, dtype: str) -> None:
    """Appends one array to a file, in C order."""
    cast = np.ascontiguousarray(array.astype(jnp.dtype(dtype)))
    # Through uint8, as bfloat16 has no buffer; flat, as a scalar has no uint8 view.
    file.write(cast.reshape(-1).view(np.uint8).data)


def cast_entries(found: Mapping[str, Entry], dtype: str) -> dict[str, Entry]:
    """Returns entries with floating-point arrays in `dtype`, or unchanged if empty."""
    entries = {
        name: Entry(e.shape, dtype if dtype and is_floating(e.dtype) else e.dtype)
        for name, e in found.items()
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
    return entries


def _header(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """Returns the beginning of a file: the length of the header, and the header."""
    header: dict[str, object] = {"__metadata__": metadata}
    start = 0
    for name, entry in entries.items():
        end = start + math.prod(entry.shape) * jnp.dtype(entry.dtype).itemsize
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
