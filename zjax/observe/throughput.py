"""Throughput of a run: the time between steps, without evaluation and saving."""

import contextlib
import time
from collections.abc import Callable, Iterator

from zjax.config.schema import Config
from zjax.observe import flops
from zjax.observe.weight_flops import flops_per_weight

NUM_SKIPPED_LAPS = 2
"""Uncounted first steps: they compile, and fill the queue of the device."""


class Throughput:
    """Averages time per step over the laps since it was last read.

    A lap ends when the metrics of the step before arrive, so laps last as long as steps
    on the device although the host never waits for the newest step.

    Args:
        num_devices: Devices of the mesh.
        peak_flops: Peak FLOP/s of one device; None omits MFU.
        flops_per_token: FLOPs with causal attention counted half, then full.
        clock: Monotonic clock in seconds.

    Example:
        >>> clock = iter([0.0, 9.0, 10.0, 10.5, 11.0]).__next__
        >>> speed = Throughput(2, 1e12, (1e9, 2e9), clock=clock)
        >>> for _ in range(4):
        ...     speed.lap(num_tokens=100)
        >>> for label, value in speed.read().items():
        ...     print(label, value)
        step_seconds 0.5
        tokens_per_second 200.0
        mfu 0.1
        mfu_full_attention 0.2
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
        """Ends a lap, which does not count if it compiled a program.

        Call it once per step, after reading the metrics of the step before.
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
        """Excludes the time of the enclosed work (evaluation, saving) from the lap.

        Wait for the newest step before entering, or its time is excluded as well.
        """
        start = self._clock()
        try:
            yield
        finally:
            self._mark += self._clock() - start

    def read(self) -> dict[str, float]:
        """Returns the averages since the last reading, and resets them.

        Returns:
            `step_seconds`, `tokens_per_second` over all devices, and if the peak is
            known `mfu` (causal attention counted half) and `mfu_full_attention`, as
            fractions. Empty if no lap counted.
        """
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


def make_throughput(
    config: Config, *, device_kind: str, num_devices: int
) -> Throughput:
    """Starts the timer of a built-in model; `observe.peak_tflops` sets the peak."""
    table = flops.peak_flops(device_kind, config.precision.compute_dtype)
    configured = config.observe.peak_tflops * 1e12
    half = flops.flops_per_token(
        config.model,
        config.data.length,
        causal_attention="half",
        per_weight=flops_per_weight(config),
    )
    full = flops.flops_per_token(
        config.model,
        config.data.length,
        causal_attention="full",
        per_weight=flops_per_weight(config),
    )
    return Throughput(num_devices, configured or table, (half, full))
