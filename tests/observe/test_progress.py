"""What is printed of a run: speed, lines, tables; and the device never waits for it."""

import io
import re
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from tests.support.gates import start_gated
from zjax.observe import LateMetrics, Progress, Throughput
from zjax.run.machine import describe_machine
from zjax.settings import schema
from zjax.sharding import mesh as meshes

VALUES = {
    "learning_rate": 3e-4,
    "loss": 3.25,
    "tokens_per_second": 41_234.5,
    "mfu": 0.5234,
    "mfu_full_attention": 0.551,
    "step_seconds": 0.25,
    "grad_norm": 0.5,
    "consumed_tokens": 10_000,
    "accuracy": 0.75,
}


def show(rows, *, terminal, num_steps=1000):
    """What a console shows when the rows are written, then closed."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=80, color_system=None)
    with Progress(num_steps, console=console) as progress:
        for step, values in rows:
            progress.write(step, values)
    return out.getvalue()


def test_every_write_is_one_line_off_a_terminal():
    text = show([(40, VALUES), (1000, {"eval_loss": 3.5})], terminal=False)
    assert text == (
        "step   40/1000  loss 3.2500  grad 0.50  lr 3.00e-04  41,234 tokens/s  "
        "MFU 52.3%  (55.1% full)  0.25 s/step  accuracy 0.75  ETA 0:04:00\n"
        "step 1000/1000  eval loss 3.5000\n"
    )
    unknown_peak = {"loss": 3.25, "step_seconds": 0.25}
    text = show([(1000, unknown_peak)], terminal=False)
    assert text == "step 1000/1000  loss 3.2500  0.25 s/step\n"


def test_a_bar_shows_count_speed_and_time_left_on_80_columns():
    text = show([(40, VALUES)], terminal=True)
    assert "40/1000 0:00:00 ETA 0:04:00" in text
    speed = "loss 3.2500  41,234 tokens/s  MFU 52.3%  (55.1% full)  0.25 s/step"
    assert speed in text


def test_the_bar_keeps_values_that_a_write_does_not_repeat():
    text = show([(40, VALUES), (50, {"eval_loss": 3.5})], terminal=True)
    assert "step   50/1000  eval loss 3.5000\n" in text
    assert "50/1000 0:00:00 ETA 0:03:58" in text


def test_a_terminal_keeps_a_line_for_each_twentieth_of_a_run():
    """Fails if the scrollback of a run has no training loss."""
    rows = [(step, {"loss": step / 10}) for step in range(10, 1001, 10)]
    text = show(rows, terminal=True)
    assert len(re.findall(r"step +\d+/1000", text)) == 21
    assert "step  100/1000  loss 10.0000" in text
    assert "step  110/1000" not in text


def test_the_cursor_comes_back_when_a_run_is_interrupted():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    try:
        with Progress(10, console=console) as progress:
            progress.write(1, {"loss": 2.5})
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert out.getvalue().endswith("\x1b[?25h")


def row(table, name):
    (line,) = [line for line in table.splitlines() if line.startswith(f"{name}  ")]
    return line.removeprefix(name).strip()


def test_the_report_says_what_is_here_on_100_columns(monkeypatch):
    """And no variable of the environment that does not matter."""
    monkeypatch.setenv("JAX_NOTE", "--a=1 --b=[data]")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("UNRELATED_TOKEN", "secret")
    table = describe_machine()
    expected = {
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "devices": "8 here of 8 in all",
        "device kind": "cpu",
        "memory kinds": "device, pinned_host, unpinned_host",
        "process": "0 of 1",
        "attention auto": "xla (cudnn needs an NVIDIA GPU and this is cpu)",
        "attention cudnn": "cannot run: it needs an NVIDIA GPU and this is cpu",
        "attention xla": "runs here",
        "JAX_NOTE": "--a=1 --b=[data]",
        "NCCL_DEBUG": "INFO",
    }
    assert {name: row(table, name) for name in expected} == expected
    for name in ("system", "CPU cores", "memory", "disk free", "flax"):
        assert row(table, name)
    assert "secret" not in table
    assert max(map(len, table.splitlines())) <= 100


class Clock:
    """Seconds that only `pass_time` moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def pass_time(self, seconds):
        self.now += seconds


def make(peak=1e12, num_devices=2):
    clock = Clock()
    return clock, Throughput(num_devices, peak, (1e9, 2e9), clock=clock)


def run_laps(clock, speed, *seconds, **settings):
    for lap in seconds:
        clock.pass_time(lap)
        speed.lap(100, **settings)


def test_the_first_two_laps_do_not_count():
    clock, speed = make()
    run_laps(clock, speed, 60.0, 7.0)
    assert speed.read() == {}
    run_laps(clock, speed, 0.5, 1.5)
    assert speed.read()["step_seconds"] == 1.0


def test_speed_is_over_all_devices_and_mfu_over_their_peak():
    clock, speed = make(peak=1e12, num_devices=2)
    run_laps(clock, speed, 1.0, 1.0, 0.5, 0.5)
    assert speed.read() == {
        "step_seconds": 0.5,
        "tokens_per_second": 200.0,
        "mfu": pytest.approx(200 * 1e9 / 2e12),
        "mfu_full_attention": pytest.approx(200 * 2e9 / 2e12),
    }
    clock, speed = make(peak=None)
    run_laps(clock, speed, 1.0, 1.0, 0.5)
    assert set(speed.read()) == {"step_seconds", "tokens_per_second"}


def test_each_reading_is_of_its_own_window():
    clock, speed = make()
    run_laps(clock, speed, 1.0, 1.0, 4.0)
    speed.read()
    run_laps(clock, speed, 2.0, 2.0)
    assert speed.read()["step_seconds"] == 2.0
    assert speed.read() == {}


@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "raises"])
def test_excluded_work_and_a_lap_that_compiled_do_not_count(fails):
    clock, speed = make()
    run_laps(clock, speed, 1.0, 1.0, 0.5)
    run_laps(clock, speed, 30.0, compiled=True)
    clock.pass_time(0.25)
    try:
        with speed.excluded():
            clock.pass_time(90.0)
            if fails:
                raise OSError
    except OSError:
        assert fails
    run_laps(clock, speed, 0.25)
    assert speed.read()["step_seconds"] == 0.5


def test_tokens_of_steps_may_differ():
    clock, speed = make()
    run_laps(clock, speed, 1.0, 1.0)
    for num_tokens in (100, 300):
        clock.pass_time(1.0)
        speed.lap(num_tokens)
    assert speed.read()["tokens_per_second"] == 200.0


def test_pushing_a_step_does_not_wait_for_it():
    """Fails if `push` reads the newest step: it would wait until the gate gives up."""
    gate = threading.Event()
    late = LateMetrics()
    late.push(1, {"loss": jnp.float32(2.5)})
    newest = start_gated(gate, patience_seconds=300)
    assert late.push(2, {"loss": newest}) == (1, {"loss": 2.5})
    assert not newest.is_ready()
    gate.set()
    assert late.flush() == (2, {"loss": 8.0})


def test_every_step_is_given_once():
    late = LateMetrics()
    given = [late.push(n, {"loss": jnp.float32(n)}) for n in range(3)]
    given += [late.flush(), late.flush()]
    assert given == [None, *((n, {"loss": float(n)}) for n in range(3)), None]


def test_values_are_read_in_any_dtype_and_arrays_are_lists():
    late = LateMetrics()
    numbers = {"scale": jnp.bfloat16(1.5), "skipped_steps": jnp.int32(3)}
    late.push(1, numbers | {"load": jnp.array([[3, 1], [2, 2]])})
    expected = {"scale": 1.5, "skipped_steps": 3.0, "load": [[3, 1], [2, 2]]}
    assert late.flush() == (1, expected)


def test_metrics_of_local_steps_are_means_over_replicas():
    """Fails if the first replica speaks for all, or if a replica's devices add up."""
    mesh = meshes.make_mesh(schema.Mesh(replica=4, data=2))
    place = NamedSharding(mesh, PartitionSpec())

    def varying(by_replica):
        numbers = np.repeat(by_replica, 2)
        parts = [
            jax.device_put(x, device)
            for x, device in zip(numbers, mesh.devices.ravel(), strict=True)
        ]
        return jax.make_array_from_single_device_arrays((), place, parts)

    metrics = {
        "loss": varying(np.float32([1, 2, 3, np.nan])),
        "weight": varying(np.float32([2, 1, 1, 0])),
        "grad_norm": varying(np.float32([1, 2, 3, 6])),
        "rows": varying(np.int32([5, 6, 7, 8])),
    }
    late = LateMetrics()
    late.push(1, metrics, is_shared=False)
    expected = {"loss": 1.75, "weight": 4.0, "grad_norm": 3.0, "rows": 26.0}
    assert late.flush() == (1, expected)
