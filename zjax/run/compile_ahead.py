"""Programs of longer sequences or more tokens, compiled while others run."""

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
    """Compiles the steps of the next length, or number of kept tokens, in a thread.

    These are all programs that read a batch before the length after that, and those of
    steps without a teacher before its stage ends. JAX keeps what is compiled for its
    shapes, so that the step finds it. Leave it as a context manager, which waits for
    the thread.

    Args:
        config: Read for `random_ltd`, `layer_drop`, `distill`, and for the programs of
            a step.
        compile: Compiles a program for a batch and a step, as `Step.compile`.
        shapes: Rows and tokens per row of batches, by the first step that has them.
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
        """Starts to compile what comes after the length and the tokens of a step."""
        first = next((first for first in self._firsts if first > number), None)
        if first is None or first in self._started:
            return
        # What cannot be compiled fails when its step comes.
        batches = self._batches_at(first, batch)
        self._started[first] = self._pool.submit(self._compile_all, first, batches)

    def _compile_all(self, first: int, batches: list[Batch]) -> None:
        end = self._config.num_steps + 1
        if self._config.buckets.form == "none":  # whose lengths come back
            end = next((other for other in self._firsts if other > first), end)
        for program in batch_programs(self._config, range(first, end)):
            for batch in batches:
                self._compile(batch, program, first)

    def _batches_at(self, step: int, batch: Batch) -> list[Batch]:
        """Shapes of new batches of a step, whose changes are the next after `batch`.

        Batches of all buckets, where something else than the first batch of one is new;
        if that is the number of kept tokens, of those with more tokens than it was.
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
        """Shapes of a batch; those of `batch` for no number of rows."""
        if num_rows:
            batch = jax.tree.map(lambda x: _with_shape(x, num_rows, length), batch)
        dropping = dropping_at(self._config, self._dropping, step, length)
        return with_dropping(batch, dropping)

    def started(self, number: int) -> bool:
        """Whether a step takes a program that was compiled ahead for the first time."""
        return number in self._started

    def wait(self, number: int) -> None:
        """Waits for the programs of such a step."""
        concurrent.futures.wait([self._started.pop(number)])


def _with_shape(x: jax.Array, num_rows: int, length: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((num_rows, length, *x.shape[2:]), x.dtype)
