"""Stops a run between two steps on a signal, and lets a checkpoint finish."""

import contextlib
import gc
import os
import signal
import stat
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils

from zjax.checkpoint.store import Store
from zjax.errors import CheckpointError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What stops a run: Ctrl-C, a scheduler, and a terminal that is gone."""
_AGAIN_SECONDS = 0.01
"""How long a signal waits for the garbage collector."""


def exit_on_signals() -> None:
    """Lets signals end the program as an error does, where no run polls for them.

    Without a handler unfinished files would remain, and the first process of a
    container would ignore SIGTERM, and be killed once its grace period is over.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # by `nohup`
            signal.signal(number, _exit)


def _exit(number: int, frame: types.FrameType | None) -> None:
    """Ends the program by an exception, outside of callbacks of the garbage collector.

    Python ignores all exceptions in such a callback, and JAX has one.
    """
    callbacks = {getattr(each, "__code__", None) for each in gc.callbacks}
    while frame is not None:
        if frame.f_code in callbacks:
            again = threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
        frame = frame.f_back
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


class Stop:
    """A request to stop a run, by a signal or by `request`."""

    def __init__(self):
        self._caught: list[int] = []

    def __call__(self, step: int) -> bool:
        """Whether to stop before this step; all processes call it and agree."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return bool(self._caught)

    @property
    def exit_status(self) -> int:
        """Exit status of a stopped program: 128 plus the number of the signal."""
        # With several processes the runtime catches SIGTERM itself.
        return 128 + (self._caught or [signal.SIGTERM])[0]

    def request(self) -> None:
        """Stops the run as SIGTERM does: all processes at the same step."""
        if not self._caught:
            self._caught.append(signal.SIGTERM)
            self._signal_others()

    def handle_signal(self, number: int, frame: Any) -> None:
        """Signal handler.

        Raises:
            KeyboardInterrupt: At the second Ctrl-C.
        """
        if number == signal.SIGINT and number in self._caught:
            raise KeyboardInterrupt
        self._caught.append(number)
        self._signal_others()
        try:
            os.write(1, b"\nstopping after this step; saving a checkpoint\n")
        except OSError:  # the terminal is gone, and no line may end the run unsaved
            _discard_output()

    def _signal_others(self) -> None:
        if jax.process_count() > 1:  # the runtime passes SIGTERM on to all
            os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def stop_signals() -> Iterator[Stop]:
    """Turns SIGTERM, SIGHUP and the first Ctrl-C into a request that the loop polls.

    SIGHUP stays ignored where `nohup` asked for it.

    Processes get the signal at different moments; they agree through JAX on the step at
    which to stop. A second Ctrl-C ends the program at once.

    Yields:
        Function `stop(step) -> bool`, to call before each step.
    """
    stop = Stop()
    numbers = set(SIGNALS)
    if jax.process_count() > 1:
        numbers.remove(signal.SIGTERM)  # the runtime catches it
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    if threading.current_thread() is not threading.main_thread():
        numbers = set()
    previous = {number: signal.signal(number, stop.handle_signal) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _discard_output() -> None:
    """Sends output of this process to a terminal that is gone to nowhere instead."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)


@contextlib.contextmanager
def finish_save_on_error(store: Store) -> Iterator[None]:
    """If the enclosed code raises, waits until a running save has ended."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(CheckpointError, jax.errors.JaxRuntimeError):
            store.wait()
        raise
