"""Metrics of a step, read one step late so that the device never waits for the host."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from zjax.sharding.mesh import REPLICA
from zjax.train.gradients.weighting import mean_metrics
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
    and the host runs at most one step ahead. Metrics that replicas do not share are
    averaged over the replicas of this process.

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
        self._pending: tuple[int, list[Metrics]] | None = None

    def push(
        self, step: int, metrics: Metrics, *, is_shared: bool = True
    ) -> tuple[int, Values] | None:
        """Stores the metrics of the step just dispatched, still being computed.

        Args:
            step: Number of the step.
            metrics: Metrics of the step.
            is_shared: Whether all devices have the same values; False for local steps,
                after which each device has those of one replica.

        Returns:
            Number and values of the step before, or None if there is none.
        """
        parts = [metrics] if is_shared else _by_replica(metrics)
        for part in parts:
            for array in part.values():
                array.copy_to_host_async()
        earlier, self._pending = self._pending, (step, parts)
        return None if earlier is None else _read(*earlier)

    def flush(self) -> tuple[int, Values] | None:
        """Waits for the newest step; call it before evaluating or saving, and last.

        Returns:
            Number and values of the newest step, or None if already returned.
        """
        newest, self._pending = self._pending, None
        return None if newest is None else _read(*newest)


def _by_replica(metrics: Metrics) -> list[Metrics]:
    """Returns the metrics of each replica of this process, from its first device."""
    parts: dict[int, Metrics] = {}
    for name, x in metrics.items():
        for shard in x.addressable_shards:
            part = parts.setdefault(_replica_of(shard.device, x.sharding), {})
            part.setdefault(name, shard.data)
    return list(parts.values())


def _replica_of(device: Any, sharding: Any) -> int:
    if not isinstance(sharding, NamedSharding):
        return 0
    mesh = sharding.mesh
    (place,) = np.argwhere(mesh.devices == device)
    return int(place[mesh.axis_names.index(REPLICA)])


def _read(step: int, parts: list[Metrics]) -> tuple[int, Values]:
    found = [{name: np.asarray(x) for name, x in part.items()} for part in parts]
    if len(found) == 1:
        return step, {name: _value(x) for name, x in found[0].items()}
    stacked = {name: np.stack([part[name] for part in found]) for name in found[0]}
    means = mean_metrics(stacked)
    return step, {name: _value(np.asarray(x)) for name, x in means.items()}


def _value(array: np.ndarray) -> Value:
    return array.tolist() if array.ndim else float(array)
