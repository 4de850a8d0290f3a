"""Values that process 0 computes for all processes, such as results of user code."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from zjax.processes.barrier import barrier

_calls = itertools.count(1)
"""Indices of calls, equal in all processes; they name barriers."""


def compute_once(compute: Callable[[], Any]) -> Any:
    """Calls a function on process 0 alone, and returns the result on all processes.

    A collective call. Processes wait up to 10 minutes.

    Args:
        compute: Function whose result is a value of JSON; in a run of one process, any
            value.

    Returns:
        The result.

    Raises:
        ZjaxError: The function raised it on process 0; all processes raise.
        PeerError: The function raised another error on process 0.

    Example:
        >>> compute_once(lambda: [0.5, None])
        [0.5, None]
    """
    if jax.process_count() == 1:
        return compute()
    text = b""
    # The barrier shares errors, and a collective would wait no longer than Gloo.
    with barrier(f"zjax-broadcast-{next(_calls)}"):
        if jax.process_index() == 0:
            text = json.dumps(compute()).encode()
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    sent = np.zeros(size, np.uint8)
    sent[: len(text)] = np.frombuffer(text, np.uint8)
    received = np.asarray(multihost_utils.broadcast_one_to_all(sent))
    return json.loads(received.tobytes())
