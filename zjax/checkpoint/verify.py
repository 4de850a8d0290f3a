"""Whether a step is as it was saved; the processes of a run share the reading."""

import pathlib

import jax
import numpy as np
from jax.experimental import multihost_utils

from zjax.checkpoint import sums
from zjax.checkpoint.sums import SUMS_FILE


def check_step(path: pathlib.Path, *, shared: bool) -> None:
    """Compares the files of a step with their checksums.

    Args:
        path: The directory of the step, which has checksums.
        shared: Whether all processes call this, so that each reads a part.

    Raises:
        OSError: The checksums cannot be read.
        ValueError: Names the first file that is not as it was saved, in all processes.
    """
    known = sums.read_sums(path / SUMS_FILE)
    several = shared and jax.process_count() > 1
    names = (
        sums.share(known, jax.process_index(), jax.process_count())
        if several
        else list(known)
    )
    damage = dict(sums.find_damage(path, known, names=names, whole_chunks=False))
    order = sorted(known)
    first = min(map(order.index, damage), default=len(order))
    if several:
        first = int(multihost_utils.process_allgather(np.int32(first)).min())
    if first < len(order):
        name = order[first]
        raise ValueError(damage.get(name, f"{name} does not match its checksum"))


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
