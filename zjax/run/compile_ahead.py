"""Compiles the programs of the next batch shape in a thread while a step runs."""

import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any

import jax

from zjax.optim.phases import batch_programs, make_phases
from zjax.schedule.training import TrainingSchedule
from zjax.typing import Batch


class CompileAhead:
    """Compiles the programs of the next change of a schedule in a background thread.

    JAX caches programs by shape, so the later step finds the program compiled. Leaving
    the context manager waits for the thread.

    Args:
        schedule: Schedule of the run.
        compile: Function of a batch, the name of a program and a step, that compiles
            the program, as `Step.compile` does.
        first_step: First step of the loop, whose programs are not compiled ahead.
    """

    def __init__(
        self,
        schedule: TrainingSchedule,
        compile: Callable[[Batch, str, int], Any],
        first_step: int,
    ):
        self._schedule, self._compile = schedule, compile
        self._phases = make_phases(schedule.config)
        self._changes = schedule.changes(first_step)
        # Programs of several buckets are needed soon after the same change.
        self._most = len(schedule.shapes) if schedule.has_buckets else 1
        self._started: dict[int, concurrent.futures.Future[None]] = {}
        self._pool = concurrent.futures.ThreadPoolExecutor(max_workers=1)

    def __enter__(self) -> "CompileAhead":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def after(self, number: int, batch: Batch) -> None:
        """Starts to compile what changes after step `number`, which read `batch`."""
        shape = self._schedule.at(number)[:2]
        while len(self._started) < self._most:
            steps = next(self._changes, None)
            if steps is None:
                return
            new, shapes = self._schedule.at(steps.start)[:2], batch
            # Batches of the user keep their shapes, of which the settings know nothing.
            if new != shape:
                shapes = jax.tree.map(functools.partial(_with_shape, new), batch)
            # Nobody reads an error of the future: a program that cannot be compiled
            # fails again when its step comes.
            self._started[steps.start] = self._pool.submit(
                self._compile_all, steps, shapes
            )

    def _compile_all(self, steps: range, batch: Batch) -> None:
        """Compiles all programs that read batches of some steps."""
        for program in batch_programs(steps, self._phases):
            self._compile(batch, program, steps.start)

    def started(self, number: int) -> bool:
        """Whether a program compiled ahead is first used at step `number`."""
        return number in self._started

    def wait(self, number: int) -> None:
        """Waits for the programs compiled ahead for step `number`."""
        concurrent.futures.wait([self._started.pop(number)])


def _with_shape(shape: tuple[int, ...], x: jax.Array) -> jax.ShapeDtypeStruct:
    """Replaces the leading dims of an array's shape by rows and tokens per row."""
    return jax.ShapeDtypeStruct((*shape, *x.shape[2:]), x.dtype)
