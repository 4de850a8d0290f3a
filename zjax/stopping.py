"""Stopping: between two steps when asked to, and with the checkpoint on its way."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils

from zjax.checkpoint.store import Store
from zjax.errors import CheckpointError

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Whether a run was asked to stop."""

    def __init__(self):
        self._caught: list[int] = []

    def __call__(self, step: int) -> bool:
        """Asked before each step, by all processes of a run, which agree on it.

        Args:
            step: Steps taken.

        Returns:
            Whether to stop here.
        """
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return bool(self._caught)

    @property
    def exit_status(self) -> int:
        """What a program that was stopped ends with: 128 plus the signal's number."""
        # Where there are many processes the runtime catches SIGTERM itself.
        return 128 + (self._caught or [signal.SIGTERM])[0]

    def ask(self) -> None:
        """Stops a run as SIGTERM does: all of its processes at the same step."""
        if not self._caught:
            self._caught.append(signal.SIGTERM)
            self._tell_others()

    def note(self, number: int, frame: Any) -> None:
        """Handles a signal.

        Args:
            number: Of the signal.
            frame: Where it came.

        Raises:
            KeyboardInterrupt: At the second Ctrl-C.
        """
        if self._caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._caught.append(number)
        self._tell_others()
        os.write(1, b"\nstopping after this step; saving a checkpoint\n")

    def _tell_others(self) -> None:
        if jax.process_count() > 1:  # the runtime listens to this one
            os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def stop_signals() -> Iterator[Stop]:
    """Turns SIGTERM and the first Ctrl-C into a question that the loop asks.

    Processes of one run get the signal at different moments; they agree through JAX on
    the step at which all of them stop. A second Ctrl-C ends the program at once.

    Yields:
        `stopped(step)`, to be asked before each step.
    """
    stopped = Stop()
    numbers = (signal.SIGINT,) if jax.process_count() > 1 else SIGNALS
    if threading.current_thread() is not threading.main_thread():
        numbers = ()
    before = {number: signal.signal(number, stopped.note) for number in numbers}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def finishing(store: Store) -> Iterator[None]:
    """Lets a checkpoint that is being written come to its end, whatever happens.

    Args:
        store: That writes it.

    Yields:
        Nothing.
    """
    try:
        yield
    except BaseException:
        with contextlib.suppress(CheckpointError, jax.errors.JaxRuntimeError):
            store.wait()
        raise
