"""Metrics of a step, read one step late so that the device never waits for the host."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from zjax.typing import Metrics

Value = int | float | list[Any]
"""A number, or an array as nested lists."""
Values = dict[str, Value]


def scalars(values: Mapping[str, Value]) -> dict[str, int | float]:
    """The numbers among the values of a step.

    Example:
        >>> scalars({"loss": 2.5, "load": [[3, 1]]})
        {'loss': 2.5}
    """
    return {name: x for name, x in values.items() if not isinstance(x, list)}


class LateMetrics:
    """Holds the metrics of the newest step on the device, and returns the ones before.

    Pushing step n waits for step n - 1 only, so the device always has its next program
    and the host runs at most one step ahead.

    Example:
        >>> import jax
        >>> late = LateMetrics()
        >>> late.push(1, {"loss": jax.numpy.float32(2.5)})
        >>> late.push(2, {"loss": jax.numpy.float32(2.0)})
        (1, {'loss': 2.5})
        >>> late.flush()
        (2, {'loss': 2.0})
    """

    def __init__(self) -> None:
        self._pending: tuple[int, Metrics] | None = None

    def push(self, step: int, metrics: Metrics) -> tuple[int, Values] | None:
        """Stores the metrics of the step just dispatched, still being computed.

        Returns:
            Number and values of the step before, or None if there is none.
        """
        for array in metrics.values():
            array.copy_to_host_async()
        earlier, self._pending = self._pending, (step, metrics)
        return None if earlier is None else _read(*earlier)

    def flush(self) -> tuple[int, Values] | None:
        """Waits for the newest step; call it before evaluating or saving, and last.

        Returns:
            Number and values of the newest step, or None if already returned.
        """
        newest, self._pending = self._pending, None
        return None if newest is None else _read(*newest)


def _read(step: int, metrics: Metrics) -> tuple[int, Values]:
    return step, {name: _value(np.asarray(array)) for name, array in metrics.items()}


def _value(array: np.ndarray) -> Value:
    return array.tolist() if array.ndim else float(array)
