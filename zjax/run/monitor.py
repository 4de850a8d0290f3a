"""Logs a training loop through three calls, without making the device wait."""

import contextlib
import pathlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from zjax.errors import OutputError
from zjax.estimate.traced import run_flops
from zjax.files import writing
from zjax.models import flops
from zjax.observe import plot
from zjax.observe.history import HISTORY, read_history
from zjax.observe.metrics import (
    LateMetrics,
    Throughput,
    Value,
    Values,
    scalars,
)
from zjax.observe.progress import describe_end
from zjax.observe.recompile import CompileReport, Trace
from zjax.observe.sinks import make_sinks
from zjax.observe.skipped import SkippedSteps
from zjax.schedule.training import TrainingSchedule
from zjax.settings.mappings import to_mapping
from zjax.settings.schema import Config
from zjax.typing import Metrics, Model

Callback = Callable[[int, Mapping[str, Value]], None]
"""`callback(step, values)`, called for each step that is logged."""


class Monitor:
    """Sends the metrics of a run to sinks and callbacks.

    Args:
        last_step: Steps already taken; files lose entries of later steps.
        num_skipped: Number of skipped steps among the steps taken.
        has_tokens: Whether batches are sequences of tokens; other models log seconds
            per step and MFU.
        callbacks: Functions called after the sinks.
        values_at: Function from a step, from 1 on, to values that only the data of the
            step tell.
        beside: Skipped steps of each model that learns beside the model of the run, by
            the prefix of the metrics of such a model.
    """

    def __init__(
        self,
        config: Config,
        model: Model,
        *,
        last_step: int,
        num_skipped: int,
        has_tokens: bool,
        num_devices: int,
        schedule: TrainingSchedule,
        callbacks: Sequence[Callback] = (),
        values_at: Callable[[int], dict[str, float]] = lambda step: {},
        beside: Mapping[str, int] = types.MappingProxyType({}),
    ):
        observe = config.observe
        if observe.plot and "jsonl" not in observe.sinks and jax.process_index() == 0:
            print("no plot is saved: it needs the sink 'jsonl'")
        self._config = config
        self._callbacks = callbacks
        self._has_tokens, self._schedule = has_tokens, schedule
        self._values_at = values_at
        self._skipped = [
            SkippedSteps(
                config.precision,
                num_steps=config.num_steps,
                num_skipped=number,
                last_step=last_step,
                prefix=prefix,
            )
            # First models beside: values of a critic that are NaN leave the policy no
            # text, and the cause is the critic.
            for prefix, number in {**beside, "": num_skipped}.items()
        ]
        self._late = LateMetrics()
        # absolute: a function of the user may change the working directory
        self._directory = pathlib.Path(config.directory).absolute()
        self._sinks = make_sinks(
            observe,
            self._directory,
            to_mapping(config),
            num_steps=config.num_steps,
            last_step=last_step,
        )
        self._trace = Trace(config.observe.profile, self._directory)
        self._compiles = CompileReport()
        self._throughput = make_throughput(
            config,
            model,
            device_kind=jax.devices()[0].device_kind,
            num_devices=num_devices,
            has_tokens=has_tokens,
        )
        self.known_step = last_step
        """Newest step with metrics that were read."""
        self.newest: Values = {}
        """Metrics of step `known_step`."""
        self._failure: OutputError | None = None

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        # an error while closing must not hide the one that ended the run
        ignored = () if error is None else (Exception,)
        with contextlib.suppress(*ignored), contextlib.ExitStack() as stack:
            # In reverse order: watchers end, sinks close, then a failure is raised.
            stack.callback(self._raise_failure)
            for sink in self._sinks:
                stack.callback(sink.close)
            stack.enter_context(self._trace)
            stack.enter_context(self._compiles)

    @property
    def has_failed(self) -> bool:
        """Whether a file could not be written: the run is to save, and end."""
        return self._failure is not None

    @property
    def skipped_in_a_row(self) -> int:
        """Newest skipped steps in a row, among steps with metrics that were read."""
        return max(each.in_a_row for each in self._skipped)

    @contextlib.contextmanager
    def step(
        self, step: int, state: Any, batch: Any, expected: Sequence[str] = ()
    ) -> Iterator[list[Metrics]]:
        """Watches one step; append the metrics to the list that is yielded."""
        metrics: list[Metrics] = []
        watch = self._compiles.watch(step, batch, expected)
        with self._trace.step(step, state), watch as compiled:
            yield metrics
        is_shared = self._schedule.exchanges.at(step).shares_metrics
        # After the dispatch: the host reads the step before while the device works.
        earlier = self._late.push(step, metrics[0], is_shared=is_shared)
        if compiled.line and jax.process_index() == 0:
            print(compiled.line, flush=True)
        rows = self._config.global_batch_size
        number = self._schedule.tokens.at(step) if self._has_tokens else rows
        self._throughput.lap(number, compiled=bool(compiled.seconds))
        if earlier is not None:
            self._log_step(*earlier)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Logs the newest step, and excludes enclosed work from the throughput."""
        newest = self._late.flush()
        if newest is not None:
            self._log_step(*newest)
        with self._throughput.excluded():
            yield

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Sends values such as `eval_loss` to sinks and callbacks, unless empty.

        The error of a file that cannot be written is raised when the monitor closes.
        """
        if not values:
            return
        for sink in self._sinks:
            try:
                sink.write(step, values)
            except OutputError as error:
                # Not raised here: the run saves a checkpoint first.
                self._failure = self._failure or error
        for callback in self._callbacks:
            callback(step, values)

    def save_plots(self) -> tuple[pathlib.Path, ...]:
        """Plots loss and speed, the load of experts and rewards; returns files."""
        directory, observe = self._directory, self._config.observe
        if jax.process_index() or not observe.plot or "jsonl" not in observe.sinks:
            return ()
        with writing(directory / HISTORY):
            history = read_history(directory / HISTORY)
        pictures = {"training.png": plot.plot_run}
        if plot.has_load(history):
            pictures["experts.png"] = plot.plot_load
        if plot.has_rewards(history):
            pictures["rewards.png"] = plot.plot_rewards
        for name, draw in pictures.items():
            with writing(directory / name):
                draw(history, directory / name, title=directory.name)
        return tuple(directory / name for name in pictures)

    def print_end(
        self,
        step: int,
        num_skipped: int,
        checkpoint: pathlib.Path | None,
        reason: str,
        resume: str,
    ) -> None:
        """Saves plots, and prints on process 0 how the run ended and how to resume."""
        pictures = self.save_plots()
        if jax.process_index() == 0:
            end = step, self._config.num_steps, num_skipped, checkpoint, pictures
            load = plot.describe_load(self.newest)
            print(describe_end(*end, load=load, reason=reason, resume=resume))

    def _raise_failure(self) -> None:
        """Raises the error of the first file that could not be written."""
        if self._failure is not None:
            raise self._failure

    def _log_step(self, step: int, values: Values) -> None:
        """Logs a due or skipped step, and raises if the step ends the run."""
        self.known_step, self.newest = step, values
        is_shared = self._schedule.exchanges.at(step).shares_metrics
        known = scalars(values)
        counted = [x.count(step, known, is_shared=is_shared) for x in self._skipped]
        due = step % self._config.observe.log_every_steps == 0
        if due or any(counted) or step == self._config.num_steps:
            values |= self._speed() | self._scheduled(step)
            self.log(step, values)
        # Only where all processes have equal values, so that all end together.
        if is_shared:
            for each in self._skipped:
                each.check(step, known)

    def _speed(self) -> dict[str, float]:
        """Averages of the throughput; without MFU where steps are not whole."""
        speed = self._throughput.read()
        if not self._has_tokens:
            speed.pop("tokens_per_second", None)
        if self._schedule.is_partial(self.known_step):
            speed.pop("mfu", None)  # counted for whole steps
            speed.pop("mfu_full_attention", None)
        return speed

    def _scheduled(self, step: int) -> dict[str, float]:
        """Values of a step that the schedule and the data decide."""
        scheduled = self._schedule.values
        if not self._has_tokens:
            scheduled = self._schedule.dropping_values
        return scheduled(step) | self._values_at(step)


def find_peak(config: Config, device_kind: str) -> float:
    """Finds the peak FLOP/s of a device, as set or by the table; 0 if unknown."""
    table = flops.peak_flops(device_kind, config.precision.compute_dtype)
    return config.observe.peak_tflops * 1e12 or table or 0.0


def make_throughput(
    config: Config,
    model: Model,
    *,
    device_kind: str,
    num_devices: int,
    has_tokens: bool = True,
) -> Throughput:
    """Starts the timer of a run; `observe.peak_tflops` sets the peak.

    Laps count tokens or, without tokens, rows.
    """
    peak = find_peak(config, device_kind)
    # Traced only where MFU follows; a model may not say what batches look like.
    if not peak or model.inputs is None:
        return Throughput(num_devices, None, (0.0, 0.0))
    work = run_flops(model, model.inputs, config)
    unit = config.data.length if has_tokens else 1
    flops_per_unit = work.seen / unit, work.full / unit
    return Throughput(num_devices, peak, flops_per_unit)
