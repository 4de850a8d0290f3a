"""Measures speed and memory of a config over a few timed steps on synthetic tokens."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from zjax.config.check import check_config
from zjax.data.loader import find_local_rows
from zjax.data.placement import place_rows
from zjax.data.source import open_rows
from zjax.errors import BenchError, ConfigError, Problem
from zjax.estimate.mesh import choose_mesh
from zjax.estimate.traced import run_flops
from zjax.jaxprs.flops import Flops
from zjax.models import flops
from zjax.models.build import make_model
from zjax.processes.agreement import versions
from zjax.run.build import Run, start_run
from zjax.run.fit import explain_out_of_memory
from zjax.run.pinned_pool import limit_pinned_pool
from zjax.settings import choices
from zjax.settings.batch import resolve_batch
from zjax.settings.schema import Config, Constant
from zjax.sharding.describe import format_bytes, render_table
from zjax.sharding.memory import num_params, stored_bytes
from zjax.sharding.placement import array_bytes
from zjax.train.state import TrainState
from zjax.typing import Batch, Device


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median and range of n measurements, 1 or more."""

    median: int | float
    min: int | float
    max: int | float
    n: int

    @classmethod
    def of(cls, values: Sequence[int | float]) -> "Spread":
        """Summarises one or more measurements.

        Example:
            >>> Spread.of([3.0, 1.0, 2.0]).describe("{:.1f}".format)
            '2.0 [1.0 to 3.0, n=3]'
        """
        return cls(statistics.median(values), min(values), max(values), len(values))

    def describe(self, form: Callable[[int | float], str]) -> str:
        """Formats the median and, if n > 1, the range; `form` formats one number."""
        if self.n == 1:
            return form(self.median)
        ends = f"{form(self.min)} to {form(self.max)}"
        return f"{form(self.median)} [{ends}, n={self.n}]"


def state_bytes(state: TrainState, device: Device) -> int:
    """Bytes of a state's shards in the default memory of one local device."""
    kind = device.default_memory().kind
    return sum(
        array_bytes(shard.data.shape, shard.data.dtype)
        for array in jax.tree.leaves(state)
        if array.sharding.memory_kind == kind
        if isinstance(array, jax.Array)  # disk arrays hold no device memory
        for shard in array.addressable_shards
        if shard.device == device
    )


def peak_bytes(devices: Sequence[Device]) -> int | None:
    """Largest allocation on any of some local devices since the process started.

    None if the devices do not report memory, as CPUs.
    """
    stats = [device.memory_stats() or {} for device in devices]
    peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
    return max(peaks, default=None)


WARM_UP_STEPS = 3
TIMED_ROUNDS = 5
STEPS_PER_ROUND = 8
"""Maximum number of steps per timed round; slow steps are timed in smaller rounds."""
_ROUND_SECONDS = 4
_LONG_SECONDS = 10
"""Seconds per step from which each step is logged."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Speed and memory of some steps of a run.

    Args:
        name: Label of the measurement.
        device: Kind of the devices, such as "NVIDIA H100".
        num_devices: Number of devices.
        tokens_per_second_per_device: Spread over the timed rounds.
        step_seconds: Spread of seconds per step, from the first call of a round until
            the last state is ready. The host does not wait between steps, as in
            training.
        model_tflops_per_device: FLOPs of the products outside of attention, forward and
            backward, without recomputation.
        mfu: Fraction of peak FLOP/s, with causal attention counted half; None if the
            peak is unknown.
        mfu_full_attention: Fraction of peak FLOP/s, with attention counted in full.
        peak_bytes: Largest allocation on any device since the start, in bytes; None if
            the devices do not report memory.
        predicted_peak_bytes: Bytes of arguments, results and temporaries of the
            compiled step (with an offloaded state: of all programs, plus transfers);
            None if the compiler does not report memory.
        state_bytes: Bytes of the state on the first device.
        moved_state_bytes: Bytes of the offloaded state per device.
        disk_state_bytes: Bytes of the offloaded state per device that are on disks.
        num_params: Number of parameters of the model.
        compile_seconds: Seconds to trace and compile the step.
        first_loss: Loss before any update, in nats per token.
        loss: Loss after the last update.
        versions: Versions of Python and packages.
    """

    name: str
    device: str
    num_devices: int
    tokens_per_second_per_device: Spread
    step_seconds: Spread
    model_tflops_per_device: float
    mfu: float | None
    mfu_full_attention: float | None
    peak_bytes: int | None
    predicted_peak_bytes: int | None
    state_bytes: int
    moved_state_bytes: int
    disk_state_bytes: int
    num_params: int
    compile_seconds: float
    first_loss: float
    loss: float
    versions: Mapping[str, str]


def measure(
    config: Config,
    *,
    name: str = "zjax",
    devices: Sequence[Device] | None = None,
    num_warm_up: int = WARM_UP_STEPS,
    num_rounds: int = TIMED_ROUNDS,
) -> Measurement:
    """Trains and times a few steps on synthetic tokens.

    The learning rate is warmed up over these steps; every other setting is as
    configured.

    Args:
        config: Settings of a run of a built-in model; the data is not read.
        name: Label of the measurement.
        devices: Devices to use; all by default.
        num_warm_up: Number of steps before the timed rounds, 1 or more.
        num_rounds: Number of timed rounds, 1 or more.

    Returns:
        The measurement; memory is measured on this process's devices.

    Raises:
        ConfigError: Settings that cannot work.
        PlanError: Arrays that cannot be placed, or that do not fit.
        BenchError: The loss did not fall, so the numbers would mean nothing.
    """
    # Before `jax.devices` starts the devices.
    limit_pinned_pool(config)
    devices = jax.devices() if devices is None else devices
    config = choose_mesh(config, devices)
    check_config(config, len(devices))
    _check_objective(config)
    num_steps = num_warm_up + num_rounds * STEPS_PER_ROUND
    # The compute of a step is that of the run.
    config = dataclasses.replace(
        config,
        num_steps=num_steps,
        optimizer=dataclasses.replace(
            config.optimizer, schedule=Constant(num_warmup_steps=num_steps)
        ),
        data=dataclasses.replace(config.data, source="synthetic"),
    )
    model = make_model(config)
    run = start_run(config, model, None, devices=devices)
    batch = _place_batch(run)
    start = time.perf_counter()
    peak = run.step.predict_peak(batch)
    compile_seconds = time.perf_counter() - start
    with explain_out_of_memory(config, run.plan, user_model=False):
        seconds, losses, state = _take_steps(run, batch, num_warm_up, num_rounds)
    check_losses(losses)
    work = run_flops(model, model.inputs, config)
    kind, dtype = devices[0].device_kind, config.precision.compute_dtype
    configured_peak = config.observe.peak_tflops * 1e12
    return Measurement(
        name=name,
        device=kind,
        num_devices=len(devices),
        **_speed(
            seconds,
            batch["tokens"].size / len(devices),
            work * (1 / config.data.length),
            peak=configured_peak or flops.peak_flops(kind, dtype),
        ),
        peak_bytes=peak_bytes(run.mesh.local_devices),
        predicted_peak_bytes=peak.total if peak else None,
        state_bytes=state_bytes(state, run.mesh.local_devices[0]),
        moved_state_bytes=stored_bytes(run.plan).offloaded,
        disk_state_bytes=stored_bytes(run.plan).disks,
        num_params=num_params(run.plan),
        compile_seconds=compile_seconds,
        first_loss=losses[0],
        loss=losses[-1],
        versions=versions(),
    )


def _check_objective(config: Config) -> None:
    """Refuses objectives that a measurement on synthetic texts does not have."""
    problem = "is not measured by zjax bench, whose batches are texts"
    problems = [
        Problem(name, choices.value_at(config, name), problem, "leave it out")
        for name in ("preference", "rl")
        if getattr(config, name)
    ]
    if problems:
        raise ConfigError(*problems)


def describe_measurement(measurement: Measurement) -> str:
    """Formats a table of at most 100 columns; unknown values have no row."""
    speed, seconds = measurement.tokens_per_second_per_device, measurement.step_seconds
    rows = [
        ("devices", f"{measurement.num_devices} x {measurement.device}"),
        ("parameters", f"{measurement.num_params:,}"),
        ("tokens/s per device", speed.describe("{:,.0f}".format)),
        ("seconds per step", seconds.describe("{:.4f}".format)),
        (
            "model TFLOP/s per device",
            f"{measurement.model_tflops_per_device:.4g}",
        ),
    ]
    shares = {
        "MFU, causal half of attention counted": measurement.mfu,
        "MFU, all attention counted": measurement.mfu_full_attention,
    }
    rows += [(what, f"{x:.1%}") for what, x in shares.items() if x is not None]
    sizes = {
        "peak memory": measurement.peak_bytes,
        "peak memory by the compiler": measurement.predicted_peak_bytes,
        "state per device": measurement.state_bytes,
        "offloaded state per device": measurement.moved_state_bytes or None,
        "of it on disks": measurement.disk_state_bytes or None,
    }
    rows += [(what, format_bytes(x)) for what, x in sizes.items() if x is not None]
    rows += [
        ("seconds to compile", f"{measurement.compile_seconds:.1f}"),
        ("loss", f"{measurement.first_loss:.4f} to {measurement.loss:.4f}"),
    ]
    return render_table((measurement.name, ""), rows, right=(1,))


def check_losses(losses: Sequence[float]) -> None:
    """Refuses losses of two or more repeated steps on one batch that do not fall.

    The speed of a program that does not train means nothing.
    """
    if np.isfinite(losses).all() and losses[-1] < losses[0]:
        return
    steps = f"in {len(losses)} steps on one batch"
    problem = f"did not fall from {losses[0]!r} {steps}"
    remedy = "lower optimizer.peak_learning_rate, or check that the run trains"
    raise BenchError(Problem("loss", losses[-1], problem, remedy))


def _place_batch(run: Run) -> Batch:
    """Places one global batch on the devices."""
    rows, shardings = open_rows(run.config, "train"), run.plan.batch_sharding
    sizes = resolve_batch(run.config, run.plan.num_batch_shares)
    num_rows = sizes.global_batch_size
    local_rows = find_local_rows(rows, num_rows, shardings)
    return place_rows(rows.read(local_rows), local_rows, num_rows, shardings)


def _take_steps(
    run: Run, batch: Batch, num_warm_up: int, num_rounds: int
) -> tuple[list[float], list[float], TrainState]:
    """Times warm-up and rounds; returns seconds per step, losses and the last state."""
    state, seconds, losses = run.state, [], []
    num_steps = 1
    for number in range(num_warm_up + num_rounds):
        if number == num_warm_up:
            # Times of earlier steps may include compilation.
            num_steps = steps_per_round(seconds[-1])
        start = time.perf_counter()
        for _ in range(num_steps):
            state, metrics = run.step(state, batch)
            losses.append(metrics["loss"])
        # The host waits once per round: waiting after each step would expose dispatch.
        jax.block_until_ready((state, losses))
        seconds.append((time.perf_counter() - start) / num_steps)
        if seconds[-1] >= _LONG_SECONDS:
            logging.warning("step %d: %.1f s", len(losses), seconds[-1])
    return seconds[num_warm_up:], [float(loss) for loss in losses], state


def steps_per_round(step_seconds: float) -> int:
    """Number of steps timed together, for a given time of one step."""
    return min(STEPS_PER_ROUND, math.ceil(_ROUND_SECONDS / step_seconds))


def _speed(
    seconds: list[float],
    num_tokens: float,
    work: Flops,
    *,
    peak: float | None,
) -> dict[str, Any]:
    """Fields of a `Measurement` that follow from the seconds per step of each round.

    A device takes `num_tokens` in a step, each of which takes `work`, and computes
    `peak` FLOP/s at most.
    """
    speed = Spread.of([num_tokens / each for each in seconds])
    return {
        "tokens_per_second_per_device": speed,
        "step_seconds": Spread.of(seconds),
        "model_tflops_per_device": work.products * speed.median / 1e12,
        "mfu": speed.median * work.seen / peak if peak else None,
        "mfu_full_attention": speed.median * work.full / peak if peak else None,
    }
