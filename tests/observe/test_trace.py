"""A trace holds the steps it was asked for."""

import gzip
import json
import threading

import jax
import jax.numpy as jnp
import pytest

from tests.support.gates import start_gated
from zjax.observe import Trace
from zjax.settings import schema


def run_steps(directory, profile, steps):
    """Traces a loop; what lies on disk as each step begins, and after it."""
    seen = []
    x = jnp.ones(16)
    step_fn = jax.jit(lambda x: x + 1)
    with Trace(profile, directory) as trace:
        for step in steps:
            with trace.step(step, x):
                x = step_fn(x)
            seen.append(bool(files(directory)))
    return seen, bool(files(directory))


def files(directory):
    return [path for path in directory.rglob("*") if path.is_file()]


def recorded_steps(directory):
    (path,) = directory.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    numbers = {
        event["args"]["step_num"] for event in events if event.get("name") == "step"
    }
    return sorted(int(number) for number in numbers)


def test_the_window_is_recorded_and_nothing_else(tmp_path):
    profile = schema.Profile(start_step=2, num_steps=2)
    seen, at_end = run_steps(tmp_path, profile, range(1, 6))
    assert seen == [False, False, False, True, True] and at_end
    assert recorded_steps(tmp_path) == [2, 3]
    assert all(path.is_relative_to(tmp_path / "trace") for path in files(tmp_path))


def test_a_run_that_ends_inside_the_window_keeps_its_trace(tmp_path):
    profile = schema.Profile(start_step=2, num_steps=9)
    assert run_steps(tmp_path, profile, range(1, 4)) == ([False] * 3, True)
    assert recorded_steps(tmp_path) == [2, 3]


@pytest.mark.parametrize(
    ("start", "steps"),
    [
        pytest.param(None, range(0, 3), id="not asked for"),
        pytest.param(9, range(0, 3), id="not reached"),
        pytest.param(2, range(5, 8), id="resumed behind it"),
    ],
)
def test_nothing_is_recorded(start, steps, tmp_path):
    profile = schema.Profile(start_step=start) if start else None
    assert run_steps(tmp_path, profile, steps) == ([False] * 3, False)


def test_an_error_inside_the_window_ends_the_trace(tmp_path):
    """Fails if the profiler stays on: a second one could not start."""
    profile = schema.Profile(start_step=0)
    for name in ("first", "second"):
        with pytest.raises(OSError), Trace(profile, tmp_path / name) as trace:
            with trace.step(0, ()):
                raise OSError
        assert files(tmp_path / name)


@pytest.mark.parametrize("edge", [1, 2], ids=["start", "end"])
def test_earlier_work_ends_before_an_edge_of_the_window(edge, tmp_path):
    """Fails if the recording starts or ends in the middle of a step."""
    profile = schema.Profile(start_step=1, num_steps=1)
    with Trace(profile, tmp_path) as trace:
        for step in range(edge):
            trace.step(step, ())
        pending = start_gated(threading.Event(), patience_seconds=0.3)
        trace.step(edge, pending)
        assert pending.is_ready()
