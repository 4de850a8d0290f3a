"""A step that compiles says why, and a trace holds the steps it was asked for."""

import contextlib
import gzip
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.support.gates import start_gated
from zjax.checkpoint.store import Store
from zjax.checkpoint.writer import check_finite
from zjax.observe import CompileReport, Trace, recompile
from zjax.observe.recompile import describe_arrays, describe_change
from zjax.settings import schema
from zjax.sharding.placement import ArrayPlan


def watched(report, step, function, batch):
    with report.watch(step, batch) as compiled:
        function(batch)
    return compiled


def zeros(*shape, dtype=np.int32):
    return {"tokens": np.zeros(shape, dtype)}


def test_only_steps_that_compile_are_reported():
    double = jax.jit(lambda batch: 2 * batch["tokens"])
    with CompileReport() as report:
        first = watched(report, 1, double, zeros(8, 128))
        again = watched(report, 2, double, zeros(8, 128))
        other = watched(report, 3, double, zeros(8, 64))
        last = watched(report, 4, double, zeros(8, 32))
    assert first.line == f"compiled the first step in {first.seconds:.1f} s"
    assert (again.seconds, again.line) == (0.0, "")
    assert other.seconds > 0
    assert other.line == (
        f"step 3 compiles again ({other.seconds:.1f} s): "
        "tokens was int32[8,128], now int32[8,64]"
    )
    assert last.line.endswith("tokens was int32[8,64], now int32[8,32]")


def test_tracing_is_not_compiling():
    with CompileReport() as report:
        assert (
            watched(report, 1, jax.jit(lambda batch: batch).lower, zeros(6)).line == ""
        )


def test_a_batch_that_did_not_change_is_not_blamed():
    batch = zeros(4, 4)
    with CompileReport() as report:
        watched(report, 1, jax.jit(lambda batch: batch["tokens"] + 1), batch)
        line = watched(
            report, 2, jax.jit(lambda batch: batch["tokens"] + 2), batch
        ).line
    assert line.endswith(
        "the batch is unchanged, so the state or the program of the step changed"
    )


def test_compiling_between_steps_is_not_the_steps():
    triple = jax.jit(lambda batch: 3 * batch["tokens"])
    with CompileReport() as report:
        watched(report, 1, triple, zeros(2, 2))
        jax.jit(lambda x: x - 1)(jnp.ones(5))
        assert watched(report, 2, triple, zeros(2, 2)).line == ""


def test_what_the_writer_of_a_checkpoint_compiles_is_not_the_steps(tmp_path):
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    # Of copies on 8 devices Orbax has each write a slice, which is a program.
    array = jax.device_put(jnp.ones((24, 128)), everywhere)
    row = ArrayPlan("x", array.shape, array.dtype, everywhere, everywhere)
    threads = []

    def listen(event, duration_secs, **_):
        if event == recompile._COMPILED:
            threads.append(threading.current_thread().name)

    double, store = jax.jit(lambda batch: 2 * batch["tokens"]), Store(str(tmp_path))
    check_finite({"x": array}, {"x": row}, 1)  # what a save compiles between steps
    with CompileReport() as report, contextlib.ExitStack() as stack:
        watched(report, 1, double, zeros(3, 7))
        jax.monitoring.register_event_duration_secs_listener(listen)
        stack.callback(jax.monitoring.unregister_event_duration_listener, listen)
        with report.watch(2, zeros(3, 7)) as compiled:
            store.save(2, {"x": array}, {"x": row}, extra={})
            double(zeros(3, 7))
            store.wait()
        store.close()
    assert threads and threading.current_thread().name not in threads
    assert (compiled.seconds, compiled.line) == (0.0, "")


def test_a_closed_report_hears_nothing():
    report = CompileReport()
    report.close()
    assert (
        watched(report, 1, jax.jit(lambda batch: batch["tokens"] - 3), zeros(3)).line
        == ""
    )


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (zeros(8, 128), zeros(8, 128), ""),
        (zeros(8, 128), zeros(8, 64), "tokens was int32[8,128], now int32[8,64]"),
        (zeros(2), zeros(2, dtype=np.uint8), "tokens was int32[2], now uint8[2]"),
        (
            zeros(2),
            {**zeros(3), "segments": {"ids": np.zeros((), np.float32)}},
            "tokens was int32[2], now int32[3]; segments/ids float32[] is new",
        ),
        ({**zeros(2), "mask": np.zeros(2, bool)}, zeros(2), "mask bool[2] is gone"),
    ],
)
def test_the_difference_is_named(old, new, expected):
    assert describe_change(describe_arrays(old), describe_arrays(new)) == expected


def test_a_program_that_runs_for_the_first_time_is_no_surprise():
    """Fails if the first exchange of local steps is said to compile again."""
    double, triple = (jax.jit(lambda x, n=n: n * x["tokens"]) for n in (2, 3))
    with CompileReport() as report:
        watched(report, 1, double, zeros(8, 128))
        with report.watch(2, zeros(8, 128), ["mean_0", "merge_0"]) as second:
            triple(zeros(8, 128))
        with report.watch(3, zeros(8, 64), ["mean_1"]) as third:
            double(zeros(8, 64))
    assert second.line == (
        f"compiled mean_0, merge_0 for step 2 in {second.seconds:.1f} s"
    )
    assert third.line.startswith("step 3 compiles again")


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
    ("start", "steps"), [(None, range(0, 3)), (9, range(0, 3)), (2, range(5, 8))]
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
