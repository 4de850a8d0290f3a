"""Metrics of a step, read one step late so that the device never waits for the host."""

import numpy as np

from zjax.typing import Metrics


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

    def push(self, step: int, metrics: Metrics) -> tuple[int, dict[str, float]] | None:
        """Stores the metrics of the step just dispatched, still being computed.

        Returns:
            Number and values of the step before, or None if there is none.
        """
        for array in metrics.values():
            array.copy_to_host_async()
        earlier, self._pending = self._pending, (step, metrics)
        return None if earlier is None else _read(*earlier)

    def flush(self) -> tuple[int, dict[str, float]] | None:
        """Waits for the newest step; call it before evaluating or saving, and last.

        Returns:
            Number and values of the newest step, or None if already returned.
        """
        newest, self._pending = self._pending, None
        return None if newest is None else _read(*newest)


def _read(step: int, metrics: Metrics) -> tuple[int, dict[str, float]]:
    return step, {name: float(np.asarray(array)) for name, array in metrics.items()}
