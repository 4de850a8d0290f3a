"""Functions of the user that see every step, and may ask to save or to stop."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import numpy as np
from jax.experimental import multihost_utils

from zjax.errors import ConfigError, Problem
from zjax.train.state import TrainState
from zjax.typing import Batch, Metrics

Ask = Literal["save", "stop"]
ASKS = ("save", "stop")


@runtime_checkable
class AfterStep(Protocol):
    """A function that `zjax.Trainer` calls after every step, in every process."""

    def __call__(
        self, step: int, state: TrainState, batch: Batch, metrics: Metrics
    ) -> Ask | None:
        """Looks at a step.

        Reading a number of `metrics` waits for the step.

        Args:
            step: Steps taken, from 1.
            state: State after the step; the next one consumes it.
            batch: Placed batch of the step.
            metrics: float32 scalars, or arrays, still on the device.

        Returns:
            "save" for a checkpoint of this state, "stop" to save and end the run
            after this step, or None. What one process asks, all do.
        """
        ...


def ask_all(
    functions: Sequence[AfterStep],
    step: int,
    state: Any,
    batch: Batch,
    metrics: Metrics,
) -> dict[str, str]:
    """Calls functions after a step.

    Several processes agree, which waits for the step; without functions nothing waits.

    Args:
        functions: Functions of the user, as many in every process.
        step: As for `AfterStep`, like the rest.
        state: State after the step.
        batch: Its batch.
        metrics: Its metrics.

    Returns:
        What is asked, "save" or "stop", with the name of the first function that does.

    Raises:
        ConfigError: A function returned something else.

    Example:
        >>> def stop_at_three(step, state, batch, metrics):
        ...     return "stop" if step == 3 else None
        >>> [ask_all([stop_at_three], n, None, {}, {}) for n in (2, 3)]
        [{}, {'stop': 'stop_at_three'}]
    """
    if not functions:
        return {}
    asked = np.zeros((len(ASKS), len(functions)), bool)
    for number, function in enumerate(functions):
        ask = function(step, state, batch, metrics)
        if ask is not None:
            asked[_index(ask, function), number] = True
    if jax.process_count() > 1:
        asked = np.any(multihost_utils.process_allgather(asked), axis=0)
    return {
        ask: _name(functions[int(row.argmax())])
        for ask, row in zip(ASKS, asked, strict=True)
        if row.any()
    }


def _index(ask: object, function: AfterStep) -> int:
    if ask not in ASKS:
        problem, remedy = f"returned {ask!r}", "return 'save', 'stop' or None"
        raise ConfigError(Problem("after_step", _name(function), problem, remedy))
    return ASKS.index(str(ask))


def _name(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__)
