"""Profiling of a window of steps with `jax.profiler`, for Perfetto or XProf."""

import contextlib
import os
import pathlib
from typing import Any

import jax

from zjax.config import schema


class Trace:
    """Profiles the steps from `observe.profile_start_step` on.

    Enter it around the loop, so that a run that ends inside the window closes the
    trace.

    Args:
        observe: The window of steps; a start of -1 records nothing.
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
        """Enters a step; starts or ends the recording at the edges of the window.

        Args:
            step: Step number of the next step.
            pending: Arrays of earlier steps, usually the state. Both edges wait for
                them, so that the window holds exactly the work of its steps.

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
