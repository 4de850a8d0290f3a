"""How every peer is timed, and the line that it prints: the same as `zjax bench`.

Three steps to warm up, then ten timed ones, each from its call until the device is
done, all on one repeated batch, so that the loss must fall.
"""

import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata

from shape import Shape

WARM_UP_STEPS = 3
TIMED_STEPS = 10


def time_steps(step: Callable[[], float]) -> tuple[list[float], list[float]]:
    """Seconds of the timed steps, and the losses of all steps.

    `step` takes one optimizer step, waits for the device and returns the loss.
    """
    seconds, losses = [], []
    for _ in range(WARM_UP_STEPS + TIMED_STEPS):
        start = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - start)
    if not all(map(math.isfinite, losses)) or losses[-1] >= losses[0]:
        raise SystemExit(f"the loss did not fall: {losses}")
    return seconds[WARM_UP_STEPS:], losses


def print_result(
    shape: Shape,
    seconds: list[float],
    losses: list[float],
    *,
    device: str,
    num_devices: int,
    peak_bytes: int | None,
    packages: tuple[str, ...],
    num_microbatches: int = 1,
) -> None:
    """Prints what a contest reads; one process of a run calls it."""
    num_tokens = shape.microbatch_size * num_microbatches * shape.length
    speed = spread([num_tokens / each for each in seconds])
    result = {
        "device": device,
        "num_devices": num_devices,
        "tokens_per_second_per_device": speed,
        "step_seconds": spread(seconds),
        "model_tflops_per_device": 6 * shape.matmul_params * speed["median"] / 1e12,
        "peak_bytes": peak_bytes,
        "num_params": shape.num_params,
        "first_loss": losses[0],
        "loss": losses[-1],
        "versions": {"python": platform.python_version()}
        | {name: metadata.version(name) for name in packages},
    }
    print(f"RESULT {json.dumps(result)}", flush=True)


def spread(values: list[float]) -> dict[str, float]:
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "n": len(values),
    }
