"""All that a run tells while it trains, behind three calls; the device never waits."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from zjax.config.schema import Config
from zjax.observe import plot
from zjax.observe.directory import writing
from zjax.observe.history import HISTORY, read_history
from zjax.observe.metrics import LateMetrics
from zjax.observe.recompile import CompileReport
from zjax.observe.sinks import make_sinks
from zjax.observe.skipped import SkippedSteps
from zjax.observe.throughput import Throughput, make_throughput
from zjax.observe.trace import Trace
from zjax.typing import Metrics

Callback = Callable[[int, Mapping[str, float]], None]
"""`callback(step, values)`: called with the numbers of each step that is logged."""


class Monitor:
    """Sends the numbers of a run to its sinks and callbacks.

    Args:
        config: `observe`, `precision`, `num_steps` and `directory`.
        last_step: Steps already taken; what the files hold of later ones is dropped.
        num_skipped: Steps of those that were skipped.
        tokens_per_step: Tokens of a global batch; 0 for a model that has none, whose
            speed is then given as seconds per step alone.
        num_devices: Devices that share the work.
        callbacks: Called after the sinks.
    """

    def __init__(
        self,
        config: Config,
        *,
        last_step: int,
        num_skipped: int,
        tokens_per_step: int,
        num_devices: int,
        callbacks: Sequence[Callback] = (),
    ):
        observe = config.observe
        if observe.plot and "jsonl" not in observe.sinks and jax.process_index() == 0:
            print("no picture is saved: observe.sinks has no 'jsonl' to draw it from")
        self._config = config
        self._callbacks = callbacks
        self._tokens_per_step = tokens_per_step
        self._skipped = SkippedSteps(
            config.precision, num_steps=config.num_steps, num_skipped=num_skipped
        )
        self._late = LateMetrics()
        self._sinks = make_sinks(config, config.directory, last_step=last_step)
        self._trace = Trace(config.observe, config.directory)
        self._compiles = CompileReport()
        self._throughput = _make_throughput(config, tokens_per_step, num_devices)
        self.known_step = last_step
        """The newest step whose numbers are known; an error is about this one."""

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        # what ended the run is not to be hidden by what fails because of it
        dropped = () if error is None else (Exception,)
        with contextlib.suppress(*dropped), contextlib.ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)
            stack.enter_context(self._trace)
            stack.enter_context(self._compiles)

    @property
    def skipped_in_a_row(self) -> int:
        """The newest steps that changed no weight; those whose numbers are known."""
        return self._skipped.in_a_row

    @contextlib.contextmanager
    def step(self, step: int, state: Any, batch: Any) -> Iterator[list[Metrics]]:
        """Watches one step; put its metrics into the list that is given.

        Args:
            step: Its number, from 1.
            state: The state that goes in.
            batch: The batch that goes in.

        Yields:
            An empty list.

        Raises:
            NonFiniteError: The step before was not finite and the run is to stop.
        """
        given: list[Metrics] = []
        with self._trace.step(step, state), self._compiles.watch(step, batch) as made:
            yield given
        earlier = self._late.push(step, given[0])
        if made.line and jax.process_index() == 0:
            print(made.line, flush=True)
        self._throughput.lap(self._tokens_per_step, compiled=bool(made.seconds))
        if earlier is not None:
            self._tell(*earlier)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Leaves the enclosed work out of the speed; tells what is still untold.

        Raises:
            NonFiniteError: The newest step was not finite and the run is to stop.
        """
        newest = self._late.flush()
        if newest is not None:
            self._tell(*newest)
        with self._throughput.excluded():
            yield

    def tell(self, step: int, values: Mapping[str, float]) -> None:
        """Sends numbers to the sinks and the callbacks.

        Args:
            step: Steps taken.
            values: Such as `eval_loss`; nothing is sent of none.

        Raises:
            OutputError: A file of the run cannot be written.
        """
        if not values:
            return
        for receive in (*(sink.write for sink in self._sinks), *self._callbacks):
            receive(step, values)

    def save_plot(self) -> pathlib.Path | None:
        """Draws loss and speed of the whole run.

        Returns:
            The picture, or None where no history is kept or no picture is wanted.

        Raises:
            OutputError: The picture cannot be written.
        """
        directory = pathlib.Path(self._config.directory)
        history = directory / HISTORY
        observe = self._config.observe
        if jax.process_index() or not observe.plot or "jsonl" not in observe.sinks:
            return None
        path = directory / "training.png"
        with writing(path):
            plot.plot_run(read_history(history), path, title=directory.name)
        return path

    def _tell(self, step: int, values: dict[str, float]) -> None:
        self.known_step = step
        is_skipped = self._skipped.count(step, values)
        due = step % self._config.observe.log_every_steps == 0
        if due or is_skipped or step == self._config.num_steps:
            values |= self._speed()
            if self._tokens_per_step:
                values["consumed_tokens"] = float(step * self._tokens_per_step)
            self.tell(step, values)
        self._skipped.check(step, values)

    def _speed(self) -> dict[str, float]:
        speed = self._throughput.read()
        if not self._tokens_per_step:
            speed.pop("tokens_per_second", None)
        return speed


def _make_throughput(
    config: Config, tokens_per_step: int, num_devices: int
) -> Throughput:
    if not tokens_per_step:
        return Throughput(num_devices, None, (0.0, 0.0))
    kind = jax.devices()[0].device_kind
    return make_throughput(config, device_kind=kind, num_devices=num_devices)
