"""Whether a step is as it was saved; the processes of a run share the reading."""

import pathlib

import jax
import numpy as np
from jax.experimental import multihost_utils

from zjax.checkpoint import sums
from zjax.checkpoint.sums import SUMS_FILE

_UNREAD = -1
"""In place of the first damaged file: the checksums could not be read."""


def check_step(path: pathlib.Path, *, shared: bool) -> None:
    """Compares the files of a step with their checksums.

    Args:
        path: The directory of the step, which has checksums.
        shared: Whether all processes call this, so that each reads a part.

    Raises:
        OSError: The checksums cannot be read.
        ValueError: Names the first file that is not as it was saved, or the checksums
            that another process cannot read; raised in all processes.
    """
    several = shared and jax.process_count() > 1
    try:
        known = sums.read_sums(path / SUMS_FILE)
    except (OSError, ValueError):
        if several:
            _least_of_all(_UNREAD)
        raise
    names = (
        sums.share(known, jax.process_index(), jax.process_count())
        if several
        else list(known)
    )
    damage = dict(sums.find_damage(path, known, names=names, whole_chunks=False))
    order = sorted(known)
    first = min(map(order.index, damage), default=len(order))
    if several:
        first = _least_of_all(first)
    if first == _UNREAD:
        raise ValueError(f"{SUMS_FILE} cannot be read by another process")
    if first < len(order):
        name = order[first]
        raise ValueError(damage.get(name, f"{name} does not match its checksum"))


def _least_of_all(number: int) -> int:
    return int(multihost_utils.process_allgather(np.int32(number)).min())


def check_file_of(path: pathlib.Path, name: str) -> None:
    """Compares one file of a step with its checksum.

    Args:
        path: The directory of the step, which has checksums.
        name: Of the file, from there.

    Raises:
        OSError: The checksums cannot be read.
        ValueError: The file is not as it was saved.
    """
    known = sums.read_sums(path / SUMS_FILE)
    if name not in known:
        raise ValueError(f"{name} is not in {SUMS_FILE}")
    for _, text in sums.find_damage(path, known, names=[name], whole_chunks=True):
        raise ValueError(text)
