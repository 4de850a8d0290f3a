"""Metrics of a step, read one step late, and the throughput of a run."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from zjax.sharding.mesh import REPLICA
from zjax.train.microbatches import mean_metrics
from zjax.typing import Metrics

Value = int | float | list[Any]
"""Number, or array as nested lists."""
Values = dict[str, Value]


def scalars(values: Mapping[str, Value]) -> dict[str, int | float]:
    """Numbers among the values of a step.

    Example:
        >>> scalars({"loss": 2.5, "load": [[3, 1]]})
        {'loss': 2.5}
    """
    return {name: x for name, x in values.items() if not isinstance(x, list)}


class LateMetrics:
    """Holds the metrics of the newest step on the device; returns earlier metrics.

    Pushing step n waits for step n - 1 only, so the device always has a next program
    and the host runs at most one step ahead. Metrics that replicas do not share are
    averaged over the replicas of this process.
    """

    def __init__(self) -> None:
        self._pending: tuple[int, list[Metrics]] | None = None

    def push(
        self, step: int, metrics: Metrics, *, is_shared: bool = True
    ) -> tuple[int, Values] | None:
        """Stores metrics still being computed; returns the step before, if any."""
        parts = [metrics] if is_shared else _by_replica(metrics)
        for part in parts:
            for array in part.values():
                # The copy overlaps with the next step, after which it is read.
                array.copy_to_host_async()
        earlier, self._pending = self._pending, (step, parts)
        return None if earlier is None else _read(*earlier)

    def flush(self) -> tuple[int, Values] | None:
        """Waits for the newest step; call before evaluating or saving, and last."""
        newest, self._pending = self._pending, None
        return None if newest is None else _read(*newest)


def _by_replica(metrics: Metrics) -> list[Metrics]:
    """Splits metrics by local replica, each from the replica's first device."""
    parts: dict[int, Metrics] = {}
    for name, x in metrics.items():
        for shard in x.addressable_shards:
            part = parts.setdefault(_replica_of(shard.device, x.sharding), {})
            part.setdefault(name, shard.data)
    return list(parts.values())


def _replica_of(device: Any, sharding: Any) -> int:
    """Index of the replica of a device; 0 without a named mesh."""
    if not isinstance(sharding, NamedSharding):
        return 0
    mesh = sharding.mesh
    (place,) = np.argwhere(mesh.devices == device)
    return int(place[mesh.axis_names.index(REPLICA)])


def _read(step: int, parts: list[Metrics]) -> tuple[int, Values]:
    """Converts metrics of a step to values, averaged over replicas."""
    found = [{name: np.asarray(x) for name, x in part.items()} for part in parts]
    if len(found) == 1:
        return step, {name: _value(x) for name, x in found[0].items()}
    stacked = {name: np.stack([part[name] for part in found]) for name in found[0]}
    means = mean_metrics(stacked)
    return step, {name: _value(np.asarray(x)) for name, x in means.items()}


def _value(array: np.ndarray) -> Value:
    return array.tolist() if array.ndim else float(array)


NUM_SKIPPED_LAPS = 2
"""Laps that do not count at first, which compile and fill the queue of the device."""


class Throughput:
    """Averages time per step over the laps since the last reading.

    A lap ends when the metrics of the step before arrive, so laps last as long as steps
    on the device although the host never waits for the newest step.

    Args:
        peak_flops: Peak FLOP/s of one device; None omits MFU.
        flops_per_token: FLOPs per token with causal attention counted half, then full;
            per row if laps count rows.
    """

    def __init__(
        self,
        num_devices: int,
        peak_flops: float | None,
        flops_per_token: tuple[float, float],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._peak = None if peak_flops is None else peak_flops * num_devices
        self._flops_per_token = flops_per_token
        self._clock = clock
        self._laps_to_skip = NUM_SKIPPED_LAPS
        self._mark = clock()
        self._num_laps, self._num_tokens, self._seconds = 0, 0, 0.0

    def lap(self, num_tokens: int, *, compiled: bool = False) -> None:
        """Ends a lap; a lap that compiled a program does not count.

        Call once per step, after reading the metrics of the step before.
        """
        now = self._clock()
        seconds, self._mark = now - self._mark, now
        if self._laps_to_skip:
            self._laps_to_skip -= 1
        elif not compiled:
            self._num_laps += 1
            self._num_tokens += num_tokens
            self._seconds += seconds

    @contextlib.contextmanager
    def excluded(self) -> Iterator[None]:
        """Excludes the time of enclosed work (evaluation, saving) from the lap.

        Wait for the newest step before, or the time of that step is excluded as well.
        """
        start = self._clock()
        try:
            yield
        finally:
            # Moves the start of the lap, as if the work took no time.
            self._mark += self._clock() - start

    def read(self) -> dict[str, float]:
        """Returns averages since the last reading, and resets; empty without laps."""
        if not self._num_laps or not self._seconds:
            return {}
        tokens_per_second = self._num_tokens / self._seconds
        values = {
            "step_seconds": self._seconds / self._num_laps,
            "tokens_per_second": tokens_per_second,
        }
        if self._peak is not None:
            half, full = self._flops_per_token
            values["mfu"] = tokens_per_second * half / self._peak
            values["mfu_full_attention"] = tokens_per_second * full / self._peak
        self._num_laps, self._num_tokens, self._seconds = 0, 0, 0.0
        return values
