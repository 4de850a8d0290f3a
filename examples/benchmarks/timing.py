"""How every peer is timed, and the line that it prints: the same as `zjax bench`.

Three steps to warm up, then five timed rounds of eight steps, each round from its first
call until the device is done, as in training, where nobody waits for every step. All on
one repeated batch, so that the loss must fall.
"""

import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

from llama import Llama
from mixtures import Mixture
from shape import Shape

WARM_UP_STEPS = 3
TIMED_ROUNDS = 5
STEPS_PER_ROUND = 8  # of short steps; of those of a second or more, fewer
ROUND_SECONDS = 4


def time_steps(
    step: Callable[[], Any], settle: Callable[[Any], float]
) -> tuple[list[float], list[float]]:
    """Seconds per step of the timed rounds, and the losses of all steps.

    `step` starts one optimizer step and returns its loss on the device; `settle` waits
    for the device and gives that loss as a number.
    """
    losses, seconds, num_steps = [], [], 1
    for number in range(WARM_UP_STEPS + TIMED_ROUNDS):
        if number == WARM_UP_STEPS:
            num_steps = min(STEPS_PER_ROUND, math.ceil(ROUND_SECONDS / seconds[-1]))
        start = time.perf_counter()
        started = [step() for _ in range(num_steps)]
        losses += [settle(loss) for loss in started]
        seconds.append((time.perf_counter() - start) / num_steps)
    seconds = seconds[WARM_UP_STEPS:]
    if not all(map(math.isfinite, losses)) or losses[-1] >= losses[0]:
        raise SystemExit(f"the loss did not fall: {losses}")
    return seconds, losses


def print_result(
    shape: Shape | Mixture | Llama,
    seconds: list[float],
    losses: list[float],
    *,
    device: str,
    num_devices: int,
    peak_bytes: int | None,
    packages: tuple[str, ...],
    num_microbatches: int | float = 1,
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
