"""Compiles the programs of the next batch shape in a thread while a step runs."""

import concurrent.futures
from collections.abc import Callable
from typing import Any

import jax

from zjax.optim.phases import batch_programs
from zjax.run.extended import dropping_at, with_dropping
from zjax.schedule.dropping import make_dropping
from zjax.settings.schema import Config
from zjax.typing import Batch


class CompileAhead:
    """Compiles the programs of the next batch shape in a background thread.

    A shape changes with the sequence length, with the number of tokens that random-LTD
    keeps, and where distillation ends. JAX caches programs by shape, so the later step
    finds the program compiled. Leaving the context manager waits for the thread.

    Args:
        config: Settings; read for `random_ltd`, `layer_drop`, `distill`, and for the
            programs of a step.
        compile: Function of a batch, the name of a program and a step, that compiles
            the program, as `Step.compile` does.
        shapes: Rows and tokens per row of batches, by the first step of each shape.
    """

    def __init__(
        self,
        config: Config,
        compile: Callable[[Batch, str, int], Any],
        shapes: dict[int, tuple[int, int]],
    ):
        self._config, self._compile = config, compile
        self._shapes = dict(sorted(shapes.items()))
        self._dropping = make_dropping(config)
        firsts = {*shapes, *self._dropping.firsts()}
        if config.distill.teacher:
            firsts.add(config.distill.num_steps(config.num_steps) + 1)
        self._firsts = sorted(step for step in firsts if step <= config.num_steps)
        self._started: dict[int, concurrent.futures.Future[None]] = {}
        self._pool = concurrent.futures.ThreadPoolExecutor(max_workers=1)

    def __enter__(self) -> "CompileAhead":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def after(self, number: int, batch: Batch) -> None:
        """Starts to compile the programs of the first new shape after step `number`."""
        first = next((first for first in self._firsts if first > number), None)
        if first is None or first in self._started:
            return
        # Nobody reads an error of the future: a program that cannot be compiled fails
        # again when its step comes.
        batches = self._batches_at(first, batch)
        self._started[first] = self._pool.submit(self._compile_all, first, batches)

    def _compile_all(self, first: int, batches: list[Batch]) -> None:
        """Compiles all programs that read `batches` from step `first` on."""
        end = self._config.num_steps + 1
        if self._config.buckets.form == "none":  # lengths of buckets come back
            end = next((other for other in self._firsts if other > first), end)
        for program in batch_programs(self._config, range(first, end)):
            for batch in batches:
                self._compile(batch, program, first)

    def _batches_at(self, step: int, batch: Batch) -> list[Batch]:
        """Shapes of the batches that are new at a step.

        With buckets, a step may bring a new bucket, or more kept tokens, which change
        the buckets longer than the number kept before, or another change that affects
        all buckets.
        """
        sizes = {self._shapes[step]} if step in self._shapes else set[tuple[int, int]]()
        if self._config.buckets.form != "none":
            before, now = map(self._dropping.num_kept, (step - 1, step))
            if now > before:
                sizes |= {x for x in self._shapes.values() if x[1] > before}
            sizes = sizes or {*self._shapes.values()}
        elif not sizes:
            sizes = {(0, self._dropping.lengths.at(step))}
        return [self._batch_at(step, batch, *size) for size in sorted(sizes)]

    def _batch_at(self, step: int, batch: Batch, num_rows: int, length: int) -> Batch:
        """Shapes of a batch at a step; `num_rows=0` keeps the shapes of `batch`."""
        if num_rows:
            batch = jax.tree.map(lambda x: _with_shape(x, num_rows, length), batch)
        dropping = dropping_at(self._config, self._dropping, step, length)
        return with_dropping(batch, dropping)

    def started(self, number: int) -> bool:
        """Whether a program compiled ahead is first used at step `number`."""
        return number in self._started

    def wait(self, number: int) -> None:
        """Waits for the programs compiled ahead for step `number`."""
        concurrent.futures.wait([self._started.pop(number)])


def _with_shape(x: jax.Array, num_rows: int, length: int) -> jax.ShapeDtypeStruct:
    """Replaces the leading dims of an array's shape by rows and length."""
    return jax.ShapeDtypeStruct((num_rows, length, *x.shape[2:]), x.dtype)
