"""Weights from safetensors files: each device reads only its own slices."""

import functools
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from zjax.checkpoint import layout, views
from zjax.checkpoint.export import DTYPES, tensor_name
from zjax.checkpoint.layout import Entry
from zjax.checkpoint.saved import place_slices
from zjax.checkpoint.views import Source
from zjax.config.paths import local_path
from zjax.errors import CheckpointError, Problem
from zjax.packages import check_installed
from zjax.reading import MOST_INDEX_BYTES, parse_json, read_text
from zjax.remedies import find_fault
from zjax.typing import Params

_NAMES = {code: name for name, code in DTYPES.items()}


def load_safetensors(path: str, rows: Any) -> Params:
    """Reads weights straight onto their shards.

    Args:
        path: A safetensors file, or a directory that holds one, or several with an
            index.
        rows: A tree of `ArrayPlan`; names are its paths with dots. Floating-point
            dtypes may differ from the file's.

    Returns:
        Arrays in their stored shapes, in the structure and dtypes of `rows`.

    Raises:
        CheckpointError: The file is missing or not safetensors, or names, shapes or
            dtypes differ; the first differences are listed.
    """
    return jax.tree.unflatten(jax.tree.structure(rows), load_in_turn(path, rows))


def load_in_turn(path: str, rows: Any) -> Iterator[Any]:
    """Reads weights one by one, as they are asked for; see `load_safetensors`.

    Args:
        path: A safetensors file, or a directory that holds one.
        rows: A tree of `ArrayPlan`.

    Returns:
        Arrays in the order of `rows`; all that is wrong with the file is told at once.
    """
    named = {tensor_name(name): r for name, r in layout.name_leaves(rows).items()}
    files = _find_tensors(path)
    expected = layout.describe_rows(named)
    source = Source(_describe(files), functools.partial(_read, files))
    inside = views.as_wanted(source, expected)
    layout.check_same(expected, inside.entries, path, cast=True)
    return (
        place_slices(functools.partial(inside.read, name), row)
        for name, row in named.items()
    )


def _find_tensors(path: str) -> dict[str, pathlib.Path]:
    """Name to the file that holds it."""
    check_installed("safetensors")
    place = pathlib.Path(local_path("checkpoint.init_from", path, CheckpointError))
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
    return dict.fromkeys(_names_in(place), place)


def _read_index(index: pathlib.Path) -> dict[str, pathlib.Path]:
    try:
        weight_map = parse_json(read_text(index, MOST_INDEX_BYTES))["weight_map"]
        files = {name: index.parent / file for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"is not an index of safetensors ({type(error).__name__}: {error})"
        raise _unusable(str(index), problem) from error
    there = {file: _names_in(file) for file in set(files.values())}
    lost = [name for name, file in files.items() if name not in there[file]]
    if lost:
        raise _unusable(str(index), f"names {lost[0]}, which {files[lost[0]]} lacks")
    return files


def _names_in(file: pathlib.Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        if fault := find_fault(file):
            raise OSError(f"{file} {fault}")
        with safe_open(file, framework="numpy") as tensors:
            return list(tensors.keys())
    except (OSError, ValueError, SafetensorError) as error:
        problem = f"is not a readable safetensors file ({error})"
        raise _unusable(str(file), problem) from error


def _describe(files: Mapping[str, pathlib.Path]) -> dict[str, Entry]:
    from safetensors import safe_open

    entries = {}
    for file in dict.fromkeys(files.values()):
        with safe_open(file, framework="numpy") as tensors:
            for name in (name for name in files if files[name] == file):
                view = tensors.get_slice(name)
                code = view.get_dtype()
                dtype = _NAMES.get(code, f"{code}")
                entries[name] = Entry(tuple(view.get_shape()), dtype)
    return {name: entries[name] for name in files}


def _read(
    files: Mapping[str, pathlib.Path], name: str, index: tuple[slice, ...]
) -> np.ndarray:
    from safetensors import safe_open

    with safe_open(files[name], framework="numpy") as tensors:
        return tensors.get_slice(name)[index]


def _unusable(path: str, problem: str) -> CheckpointError:
    remedy = "give a .safetensors file, or a directory with one or with an index"
    return CheckpointError(Problem("checkpoint.init_from", path, problem, remedy))
