"""Arrays of replicas that a run with other replicas or codecs takes over.

Replicas that step apart continue from the anchor, each with the optimizer state of the
first saved one. What codecs lost starts at 0, and so does the sum of the learning rates
since the replicas met.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from absl import logging

from zjax.checkpoint.layout import Entry
from zjax.checkpoint.views import Source

_REPLICAS, _MASTER, _ANCHOR = "extra/replicas/", "extra/replicas/master/", "master/"
_RATE_SUM = "/rate_sum"
_CODECS = tuple(f"extra/{part}" for part in ("worker", "server", "errors", "arriving"))

Read = Callable[[tuple[slice, ...]], np.ndarray]


def adapted_extra(source: Source, expected: Mapping[str, Entry]) -> dict[str, Read]:
    """Readers of the arrays that a checkpoint holds for other replicas or codecs.

    Args:
        source: Arrays of the checkpoint.
        expected: Arrays of the run, by name.

    Returns:
        Functions that read a slice, by name.
    """
    readers: dict[str, Read] = {}
    for name, entry in expected.items():
        saved = source.entries.get(name)
        if saved == entry:
            continue
        if name.startswith(_CODECS):
            readers[name] = _zeros(entry)
        elif name.startswith(_REPLICAS) and saved and _differs_in_number(saved, entry):
            meets = name.endswith(_RATE_SUM)
            first = _first_replica(source, name, entry)
            readers[name] = _zeros(entry) if meets else first
    _report(source, expected, readers)
    return readers


def is_of_codec(name: str) -> bool:
    """Whether an array may be missing or unused, as it starts at 0.

    Example:
        >>> is_of_codec("extra/worker"), is_of_codec("extra/momentum/w")
        (True, False)
    """
    return name.startswith(_CODECS)


def _differs_in_number(saved: Entry, entry: Entry) -> bool:
    same = saved.dtype == entry.dtype and not saved.key_impl
    return same and saved.shape[1:] == entry.shape[1:]


def _zeros(entry: Entry) -> Read:
    def read(index: tuple[slice, ...]) -> np.ndarray:
        return np.zeros([s.stop - s.start for s in index], np.dtype(entry.dtype))

    return read


def _first_replica(source: Source, name: str, entry: Entry) -> Read:
    anchor = name.replace(_MASTER, _ANCHOR, 1)

    def read(index: tuple[slice, ...]) -> np.ndarray:
        if anchor != name:
            x = source.read(anchor, index[1:])
        else:
            x = source.read(name, (slice(0, 1), *index[1:]))[0]
        return np.broadcast_to(x, (index[0].stop - index[0].start, *x.shape))

    return read


def _report(source: Source, expected: Mapping[str, Entry], readers: Any) -> None:
    if jax.process_index() != 0:
        return
    if name := next((name for name in readers if name.startswith(_REPLICAS)), None):
        saved, number = source.entries[name].shape[0], expected[name].shape[0]
        text = "%s replicas were saved: %s replicas continue from where they last met"
        logging.warning(text, saved, number)
    if any(is_of_codec(name) for name in readers):
        logging.warning("errors of the codec start at 0: none were saved for this mesh")
