"""Adapts arrays of replicas and codecs to a run with other replicas or codecs.

Replicas that take local steps continue from the anchor, each with the optimizer state
of the first saved replica. Error feedback of codecs starts at 0, and so does the sum of
learning rates since the last exchange.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from absl import logging

from zjax.errors import CheckpointError, Problem
from zjax.weights.source import Entry, Source

_REPLICAS, _MASTER, _ANCHOR = "extra/replicas/", "extra/replicas/master/", "master/"
_RATE_SUM = "/rate_sum"
_ERRORS = tuple(f"extra/{part}" for part in ("worker", "server", "errors"))
_CODECS = (*_ERRORS, "extra/arriving")

Read = Callable[[tuple[slice, ...]], np.ndarray]


def adapted_extra(
    source: Source, expected: Mapping[str, Entry], *, keeps_errors: bool
) -> dict[str, Read]:
    """Returns readers, by name, of arrays saved for other replicas or codecs.

    `keeps_errors` tells whether saved error feedback fits the messages of the run.
    """
    readers: dict[str, Read] = {}
    for name, entry in expected.items():
        saved = source.entries.get(name)
        # Error feedback of equal shape may still belong to other messages.
        if saved == entry and (keeps_errors or not name.startswith(_ERRORS)):
            continue
        if name.startswith(_CODECS):
            readers[name] = _zeros(entry)
        elif name.startswith(_REPLICAS) and saved and _differs_in_number(saved, entry):
            # Replicas continue as right after an exchange, where the sum is 0.
            meets = name.endswith(_RATE_SUM)
            first = _first_replica(source, name, entry)
            readers[name] = _zeros(entry) if meets else first
    _report(source, expected, readers)
    return readers


def check_apart(
    found: Mapping[str, Entry], expected: Mapping[str, Entry], place: str
) -> None:
    """Refuses a state of local-step replicas in a run without any, and vice versa."""
    saved, wanted = (
        any(name.startswith(_REPLICAS) for name in names) for names in (found, expected)
    )
    if saved != wanted:
        has = "has" if saved else "has no"
        problem = f"{has} replicas that take local steps, unlike this run"
        remedy = (
            "continue with the saved communication.local_steps and optimizer.rule, "
            "or start a run from its weights with checkpoint.init_from"
        )
        raise CheckpointError(Problem("checkpoint", place, problem, remedy))


def may_be_unused(name: str) -> bool:
    """Whether a run may ignore an array of a checkpoint.

    Error feedback starts at 0 then. Older checkpoints hold an outer momentum for frozen
    parameters, too, which no outer step moves.

    Example:
        >>> may_be_unused("extra/worker"), may_be_unused("extra/replicas/master/w")
        (True, False)
    """
    return name.startswith((*_CODECS, "extra/momentum/"))


def _differs_in_number(saved: Entry, entry: Entry) -> bool:
    """Whether two arrays differ at most in the number of replicas."""
    same = saved.dtype == entry.dtype and not saved.key_impl
    return same and saved.shape[1:] == entry.shape[1:]


def _zeros(entry: Entry) -> Read:
    """Returns a reader of zeros."""

    def read(index: tuple[slice, ...]) -> np.ndarray:
        return np.zeros([s.stop - s.start for s in index], np.dtype(entry.dtype))

    return read


def _first_replica(source: Source, name: str, entry: Entry) -> Read:
    """Returns a reader that gives all replicas the anchor or the first replica."""
    anchor = name.replace(_MASTER, _ANCHOR, 1)

    def read(index: tuple[slice, ...]) -> np.ndarray:
        # Parameters of replicas differ until they meet in the anchor.
        if anchor != name:
            x = source.read(anchor, index[1:])
        else:
            x = source.read(name, (slice(0, 1), *index[1:]))[0]
        return np.broadcast_to(x, (index[0].stop - index[0].start, *x.shape))

    return read


def _report(source: Source, expected: Mapping[str, Entry], readers: Any) -> None:
    """Warns on process 0 of adapted replicas and of restarted error feedback."""
    if jax.process_index() != 0:
        return
    if name := next((name for name in readers if name.startswith(_REPLICAS)), None):
        saved, number = source.entries[name].shape[0], expected[name].shape[0]
        text = "%s replicas were saved: %s replicas continue from where they last met"
        logging.warning(text, saved, number)
    if any(name.startswith(_ERRORS) for name in readers):
        text = "errors of the codec start at 0: none were saved for these messages"
        logging.warning(text)
