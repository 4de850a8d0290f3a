"""A window of steps recorded by jax.profiler, to be opened in Perfetto or XProf."""

import contextlib
import os
import pathlib
from typing import Any

import jax

from zjax.config import schema


class Trace:
    """Records the steps from `observe.profile_start_step` on.

    Use it as a context manager around the loop, so that a run that ends inside the
    window still closes the trace.

    Args:
        observe: Says which steps; a start of -1 records nothing.
        directory: Directory of the run; the trace goes to `<directory>/trace`.
    """

    def __init__(
        self, observe: schema.Observe, directory: str | os.PathLike[str]
    ) -> None:
        start = observe.profile_start_step
        stop = start + observe.profile_num_steps
        self._window = range(start, stop) if start >= 0 else range(0)
        self._running = False
        self.path = pathlib.Path(directory) / "trace"

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, *reason: object) -> None:
        self._stop()

    def step(
        self, step: int, pending: Any
    ) -> contextlib.AbstractContextManager[object]:
        """Enters a step; starts or ends the recording at the window's edges.

        Args:
            step: Number of the step about to run.
            pending: Arrays of the steps before, usually the state. They are waited for
                at both edges of the window, so that it holds the work of its steps and
                of no others.

        Returns:
            A context for the step's dispatch, which names it in the trace.
        """
        inside = step in self._window
        if inside != self._running:
            jax.block_until_ready(pending)
        if inside and not self._running:
            jax.profiler.start_trace(str(self.path))
            self._running = True
        if not inside:
            self._stop()
            return contextlib.nullcontext()
        return jax.profiler.StepTraceAnnotation("step", step_num=step)

    def _stop(self) -> None:
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
