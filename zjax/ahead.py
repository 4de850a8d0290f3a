"""Programs of longer sequences, compiled while steps of shorter ones run."""

import concurrent.futures
from collections.abc import Callable
from typing import Any

import jax

from zjax.config.lengths import make_lengths
from zjax.config.schema import Config
from zjax.optim.programs import programs_at
from zjax.typing import Batch


class CompileAhead:
    """Compiles the steps of the next length in a thread.

    JAX keeps what is compiled for its shapes, so that the step finds it. Leave it as a
    context manager, which waits for the thread.

    Args:
        config: Read for `sequence_warmup` and for the programs of a step.
        compile: Compiles a program of the step for a batch, as `Step.compile`.
    """

    def __init__(self, config: Config, compile: Callable[[Batch, str], Any]):
        self._config, self._compile = config, compile
        self._lengths = make_lengths(config)
        self._firsts = list(self._lengths.changes())
        self._is_due = True
        self._started: dict[int, list[concurrent.futures.Future[Any]]] = {}
        self._pool = concurrent.futures.ThreadPoolExecutor(max_workers=1)

    def __enter__(self) -> "CompileAhead":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def after(self, number: int, batch: Batch) -> None:
        """Starts to compile what comes after the length of a step.

        Args:
            number: Number of the step.
            batch: Its batch.
        """
        while self._firsts and self._firsts[0] <= number:
            self._firsts.pop(0)
            self._is_due = True
        if self._firsts and self._is_due:
            self._is_due = False
            length = self._lengths.at(self._firsts[0])
            shapes = jax.tree.map(lambda x: _with_length(x, length), batch)
            # What cannot be compiled fails when its step comes.
            self._started[self._firsts[0]] = [
                self._pool.submit(self._compile, shapes, program)
                for program in programs_at(self._config, self._firsts[0])
            ]

    def started(self, number: int) -> bool:
        """Whether a step takes a program that was compiled ahead for the first time."""
        return number in self._started

    def wait(self, number: int) -> None:
        """Waits for the programs of such a step."""
        concurrent.futures.wait(self._started.pop(number))


def _with_length(x: jax.Array, length: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((x.shape[0], length, *x.shape[2:]), x.dtype)
