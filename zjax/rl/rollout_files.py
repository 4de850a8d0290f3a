"""Files of half-learned rollouts, beside the checkpoints that name them.

A checkpoint within a rollout holds the name, the size and the checksum of a file with
the batches of the next steps.
"""

import dataclasses
import hashlib
import io
import os
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zjax.checkpoint.steps import path_aside
from zjax.checkpoint.verify import INTACT, Reader, Verdict
from zjax.errors import DataError, Problem
from zjax.files import new_file, sync_directory, writing

FOLDER = "rollouts"
"""Folder of the files, in the directory of a run."""
_REMEDY = "restore the file, or continue from another checkpoint"


def path_at(directory: pathlib.Path, step: int) -> pathlib.Path:
    """Path of the file beside the checkpoint of a step."""
    return directory / f"{step}.npz"


def write(path: pathlib.Path, batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Writes batches, completely or not at all; returns name, size and checksum."""
    flat = {
        os.fspath(pathlib.PurePosixPath(str(number), *(part.key for part in keys))): x
        for number, batch in enumerate(batches)
        for keys, x in jax.tree_util.tree_leaves_with_path(batch)
    }
    with writing(path), new_file(path) as partial:
        with partial.open("wb") as file:
            np.savez(file, **flat)
        content = partial.read_bytes()
    checksum = hashlib.sha256(content).hexdigest()
    return {"file": path.name, "sha256": checksum, "bytes": len(content)}


def read(directory: pathlib.Path, left: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Reads the batches that a checkpoint names, after a check of all bytes.

    Raises:
        DataError: The file is missing or damaged.
    """
    content, fault = _read_bytes(directory, left)
    if fault:
        path = str(directory / left["file"])
        raise DataError(Problem("rollout", path, fault, _REMEDY))
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        flat = {name: file[name] for name in file.files}
    return [_nested(flat, f"{number}/") for number in range(len(left["values"]))]


def find_fault(directory: pathlib.Path, left: Mapping[str, Any]) -> str:
    """Tells why a file is not the file of a checkpoint; empty if it is."""
    return _read_bytes(directory, left)[1]


def _read_bytes(directory: pathlib.Path, left: Mapping[str, Any]) -> tuple[bytes, str]:
    """Reads a file in bounded memory; also tells what is wrong with the bytes."""
    try:
        with (directory / left["file"]).open("rb") as file:
            # One byte more tells a file that has grown.
            content = file.read(left["bytes"] + 1)
    except OSError as error:
        return b"", f"cannot be read ({error.strerror})"
    is_same = hashlib.sha256(content).hexdigest() == left["sha256"]
    fault = "" if is_same else "is not the file that the checkpoint was saved with"
    return content, fault


def inspect(verdict: Verdict) -> Verdict:
    """Adds the fault of a half-learned rollout to the verdict of a checkpoint."""
    if verdict.problem != INTACT:
        return verdict
    steps = verdict.path.parent
    extra = Reader(steps).index(int(verdict.path.name))["extra"]
    left = (extra.get("data") or {}).get("left")
    folder = steps.parent / FOLDER
    if left is None or not (fault := find_fault(folder, left)):
        return verdict
    problem = f"damaged: {FOLDER}/{left['file']} {fault}"
    return dataclasses.replace(verdict, problem=problem)


def forget(directory: pathlib.Path, steps: Collection[int]) -> None:
    """Removes files of other steps, and files that killed processes left unfinished."""
    files = [x for x in directory.glob("*.npz") if x.stem.isdecimal()]
    old = [path for path in files if int(path.stem) not in steps]
    for path in [*old, *directory.glob(".*.npz.partial")]:
        path.unlink(missing_ok=True)


def set_aside(directory: pathlib.Path, step: int) -> list[pathlib.Path]:
    """Renames the files of later steps than `step`; returns new paths.

    Args:
        directory: Directory of a run.
        step: Step at which the run goes on.
    """
    moved, folder = [], directory / FOLDER
    files = {int(x.stem): x for x in folder.glob("*.npz") if x.stem.isdecimal()}
    for later in sorted(number for number in files if number > step):
        moved.append(path_aside(folder, later, ".npz"))
        os.rename(files[later], moved[-1])
    if moved:
        sync_directory(folder)
    return moved


def _nested(flat: Mapping[str, np.ndarray], prefix: str) -> dict[str, Any]:
    """Returns the arrays below a prefix in nested dicts."""
    batch: dict[str, Any] = {}
    for name, x in flat.items():
        if name.startswith(prefix):
            *outer, last = name.removeprefix(prefix).split("/")
            inner = batch
            for key in outer:
                inner = inner.setdefault(key, {})
            inner[last] = x
    return batch
