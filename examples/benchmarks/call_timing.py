"""How programs time calls of kernels and layers, and the line that they print."""

import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import timing

WARM_UP_CALLS = 3
ROUNDS = 7
ROUND_SECONDS = 0.1


def time_calls(
    call: Callable[[], Any], wait: Callable[[Any], Any], *, min_calls: int = 1
) -> list[float]:
    """Seconds per call of several rounds, each long enough for a clock."""
    for _ in range(WARM_UP_CALLS):
        wait(call())
    start = time.perf_counter()
    wait(call())
    num_calls = math.ceil(ROUND_SECONDS / (time.perf_counter() - start))
    num_calls = max(num_calls, min_calls)
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(num_calls):
            last = call()
        wait(last)
        seconds.append((time.perf_counter() - start) / num_calls)
    return seconds


def time_fastest(
    ways: Mapping[str, Callable[[], Any]],
    wait: Callable[[Any], Any],
    metric: str,
    *,
    min_calls: int = 1,
) -> list[float]:
    """Times several ways to compute the same, of which some may fail."""
    found = {}
    for way, call in ways.items():
        try:
            found[way] = time_calls(call, wait, min_calls=min_calls)
        except RuntimeError as error:
            print(f"{metric}, {way}: {str(error)[:300]}", file=sys.stderr)
        else:
            note(f"{metric}, {way}", found[way])
    if not found:
        raise SystemExit(f"{metric}: no way to compute it runs")
    return min(found.values(), key=statistics.median)


def note(metric: str, seconds: list[float]) -> None:
    """Prints progress for whoever watches a run."""
    text = f"{metric}: {statistics.median(seconds) * 1e3:.3f} ms"
    print(text, file=sys.stderr, flush=True)


def rates(work: float, seconds: list[float]) -> dict[str, float]:
    """Median and range of the work per second."""
    return timing.spread([work / each for each in seconds])


def print_result(
    metrics: Mapping[str, Any], *, device: str, packages: tuple[str, ...]
) -> None:
    versions = {"python": platform.python_version()}
    versions |= {name: metadata.version(name) for name in packages}
    result = {"device": device, "num_devices": 1, "versions": versions, **metrics}
    print(f"RESULT {json.dumps(result)}", flush=True)
