"""Verification of a step, shared by the processes of a run."""

import pathlib

import jax
import numpy as np
from jax.experimental import multihost_utils

from zjax.checkpoint import sums
from zjax.checkpoint.sums import SUMS_FILE

_UNREAD = -1
"""Stands for the first damaged file if the checksums cannot be read."""


def check_step(path: pathlib.Path, *, shared: bool) -> None:
    """Compares the files of a step with their checksums.

    Args:
        path: Directory of a step with checksums.
        shared: Whether all processes call this and each reads a share of the files.

    Raises:
        OSError: The checksums cannot be read.
        ValueError: Names the first damaged file, or says that another process cannot
            read the checksums; raised in all processes.
    """
    is_shared = shared and jax.process_count() > 1
    try:
        known = sums.read_sums(path / SUMS_FILE)
    except (OSError, ValueError):
        if is_shared:
            _min_over_processes(_UNREAD)
        raise
    names = (
        sums.partition(known, jax.process_index(), jax.process_count())
        if is_shared
        else list(known)
    )
    damage = dict(sums.find_damage(path, known, names=names, whole_chunks=False))
    order = sorted(known)
    first = min(map(order.index, damage), default=len(order))
    if is_shared:
        first = _min_over_processes(first)
    if first == _UNREAD:
        raise ValueError(f"{SUMS_FILE} cannot be read by another process")
    if first < len(order):
        name = order[first]
        raise ValueError(damage.get(name, f"{name} does not match its checksum"))


def _min_over_processes(number: int) -> int:
    return int(multihost_utils.process_allgather(np.int32(number)).min())


def check_file_of(path: pathlib.Path, name: str) -> None:
    """Compares one file of a step with its checksum.

    Args:
        path: Directory of a step with checksums.
        name: Path of the file relative to it.

    Raises:
        OSError: The checksums cannot be read.
        ValueError: The file is damaged.
    """
    known = sums.read_sums(path / SUMS_FILE)
    if name not in known:
        raise ValueError(f"{name} is not in {SUMS_FILE}")
    for _, text in sums.find_damage(path, known, names=[name], whole_chunks=True):
        raise ValueError(text)
