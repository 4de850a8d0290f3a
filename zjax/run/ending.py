"""Ends a run between two steps: callbacks, early stopping and signals."""

import contextlib
import gc
import math
import os
import signal
import stat
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import numpy as np
from jax.experimental import multihost_utils

from zjax.checkpoint.store import Store
from zjax.errors import CheckpointError, ConfigError, Problem
from zjax.settings.schema import EarlyStopping
from zjax.train.state import TrainState
from zjax.typing import Batch, Metrics

Ask = Literal["save", "stop"]
ASKS = ("save", "stop")


@runtime_checkable
class AfterStep(Protocol):
    """Function that `zjax.Trainer` calls after every step, in every process."""

    def __call__(
        self, step: int, state: TrainState, batch: Batch, metrics: Metrics
    ) -> Ask | None:
        """Looks at a step, and may ask for a checkpoint or the end of the run.

        Reading a number of `metrics` waits for the step.

        Args:
            step: Number of steps taken, 1 or more.
            state: State after the step; the next step consumes it.
            batch: Placed batch of the step.
            metrics: float32 scalars, or arrays, still on the device.

        Returns:
            "save" for a checkpoint of this state, "stop" to save and end the run after
            this step, or None. All processes follow if one process asks.
        """
        ...


def ask_all(
    functions: Sequence[AfterStep],
    step: int,
    state: Any,
    batch: Batch,
    metrics: Metrics,
) -> dict[str, str]:
    """Calls the user's functions after a step; returns the first that asks, by request.

    With several processes all agree, which waits for the step; without functions
    nothing waits. Every process needs the same number of functions.
    """
    if not functions:
        return {}
    asked = np.zeros((len(ASKS), len(functions)), bool)
    for number, function in enumerate(functions):
        ask = function(step, state, batch, metrics)
        if ask is not None:
            asked[_index(ask, function), number] = True
    if jax.process_count() > 1:
        asked = np.any(multihost_utils.process_allgather(asked), axis=0)
    return {
        ask: _name(functions[int(row.argmax())])
        for ask, row in zip(ASKS, asked, strict=True)
        if row.any()
    }


def _index(ask: object, function: AfterStep) -> int:
    """Position of a request in `ASKS`; refuses any other result of a function."""
    if ask not in ASKS:
        problem, remedy = f"returned {ask!r}", "return 'save', 'stop' or None"
        raise ConfigError(Problem("after_step", _name(function), problem, remedy))
    return ASKS.index(str(ask))


def _name(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__)


KEY = "patience"
"""Name of the counters of `Patience` in a checkpoint's `extra`."""
REMEDY = "raise evaluation.early_stopping.patience to go on"


class Patience:
    """Counts evaluations in a row that did not improve on the best one.

    Args:
        settings: Evaluations and decrease that count; None never ends a run.
        saved: Counters from a checkpoint, as `state` returned them; None for a new
            run.
    """

    def __init__(
        self,
        settings: EarlyStopping | None,
        saved: Mapping[str, Any] | None = None,
    ):
        saved = saved or {}
        self._limit = settings.patience if settings else math.inf
        self._min_improvement = settings.min_improvement if settings else 0.0
        self._best: float | None = saved.get("best")
        self._best_step = int(saved.get("best_step", 0))
        self._num_without = int(saved.get("num_without", 0))
        self.lowest = lowest_evaluation({KEY: saved})
        """Step and loss of the evaluation with the lowest loss; None before any."""

    def count(self, step: int, loss: float) -> bool:
        """Counts the evaluation of a step; returns whether the loss is a new minimum.

        `lowest` ignores `min_improvement`, which only patience reads. NaN is no
        improvement.
        """
        best = math.inf if self._best is None else self._best
        if loss < best - self._min_improvement:
            self._best, self._best_step, self._num_without = loss, step, 0
        else:
            self._num_without += 1
        is_lowest = loss < (math.inf if self.lowest is None else self.lowest[1])
        if is_lowest:
            self.lowest = step, loss
        return is_lowest

    @property
    def reason(self) -> str:
        """Why the run should end; empty if it should not."""
        if self._num_without < self._limit:
            return ""
        number = f"{self._num_without} evaluations"
        if self._best is None:
            return f"eval_loss was not finite in {number}"
        bound = self._best - self._min_improvement
        return (
            f"eval_loss was {self._best:.6g} at step {self._best_step} and not below "
            f"{bound:.6g} in {number} since"
        )

    def state(self) -> dict[str, Any]:
        """Counters as JSON values, from which a resumed run continues to count."""
        return {
            "best": self._best,
            "best_step": self._best_step,
            "num_without": self._num_without,
            "lowest": self.lowest,
        }


def lowest_evaluation(extra: Mapping[str, Any]) -> tuple[int, float] | None:
    """Reads step and loss of the lowest evaluation from a checkpoint's `extra`.

    None where no evaluation is known.

    Example:
        >>> lowest_evaluation({"patience": {"lowest": [20, 2.5]}})
        (20, 2.5)
    """
    step, loss = (extra.get(KEY) or {}).get("lowest") or (0, None)
    return None if loss is None else (int(step), float(loss))


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that stop a run: Ctrl-C, a scheduler's SIGTERM, and a closed terminal."""
_AGAIN_SECONDS = 0.01
"""Seconds until a signal that arrived in a garbage-collector callback is sent again."""


def exit_on_signals() -> None:
    """Makes signals raise exceptions, for cleanup in programs without a training loop.

    Without a handler unfinished files would remain. The first process of a container
    would ignore SIGTERM, and be killed after the grace period.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # set by `nohup`
            signal.signal(number, _exit)


def _exit(number: int, frame: types.FrameType | None) -> None:
    """Ends the program by an exception, outside of garbage-collector callbacks.

    Python ignores all exceptions in such a callback, and JAX has one.
    """
    callbacks = {getattr(each, "__code__", None) for each in gc.callbacks}
    while frame is not None:
        if frame.f_code in callbacks:
            again = threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), number))
            # A timer must not keep the program alive.
            again.daemon = True
            again.start()
            return
        frame = frame.f_back
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


class Stop:
    """Request to stop a run, by a signal or by `request`."""

    def __init__(self):
        self._caught: list[int] = []

    def __call__(self, step: int) -> bool:
        """Whether to stop before step `step`; all processes call it and agree."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return bool(self._caught)

    def is_requested(self) -> bool:
        """Whether this process was asked to stop; other processes may not know yet."""
        return bool(self._caught)

    @property
    def exit_status(self) -> int:
        """Exit status of a stopped program: 128 plus the number of the signal."""
        # With several processes the runtime catches SIGTERM itself.
        return 128 + (self._caught or [signal.SIGTERM])[0]

    def request(self) -> None:
        """Stops the run as SIGTERM does: all processes stop at one step."""
        if not self._caught:
            self._caught.append(signal.SIGTERM)
            self._signal_others()

    def handle_signal(self, number: int, frame: Any) -> None:
        """Notes a signal for the loop; a second Ctrl-C raises KeyboardInterrupt."""
        if number == signal.SIGINT and number in self._caught:
            raise KeyboardInterrupt
        self._caught.append(number)
        self._signal_others()
        try:
            os.write(1, b"\nstopping after this step; saving a checkpoint\n")
        except OSError:  # the terminal is gone, and no line may end the run unsaved
            _discard_output()

    def _signal_others(self) -> None:
        """Sends this process SIGTERM, which the JAX runtime passes on to all."""
        if jax.process_count() > 1:  # the runtime catches SIGTERM
            os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def stop_signals() -> Iterator[Stop]:
    """Turns SIGTERM, SIGHUP and the first Ctrl-C into a request that the loop polls.

    Yields `stop(step) -> bool`, to call before each step. Processes get a signal at
    different moments; they agree through JAX on the step at which to stop. A second
    Ctrl-C ends the program at once. SIGHUP stays ignored where `nohup` asked for that.
    """
    stop = Stop()
    numbers = set(SIGNALS)
    if jax.process_count() > 1:
        numbers.remove(signal.SIGTERM)  # the runtime catches it
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    if threading.current_thread() is not threading.main_thread():
        # Python sets signal handlers in the main thread alone.
        numbers = set()
    previous = {number: signal.signal(number, stop.handle_signal) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _discard_output() -> None:
    """Redirects stdout and stderr to /dev/null where the terminal is gone."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)


@contextlib.contextmanager
def finish_save_on_error(store: Store) -> Iterator[None]:
    """Waits for a running save before an error of the enclosed code is raised."""
    try:
        yield
    except BaseException:
        # The error to report is the one of the enclosed code.
        with contextlib.suppress(CheckpointError, jax.errors.JaxRuntimeError):
            store.wait()
        raise
