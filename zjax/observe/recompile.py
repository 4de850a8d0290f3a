"""Compilations of a run with causes, and profiles of a window of steps."""

import contextlib
import dataclasses
import os
import pathlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.monitoring

from zjax.settings import schema
from zjax.sharding.naming import path_of

_COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass
class Compiled:
    """Compilation in one step: seconds (0.0 for none) and a line for the user."""

    seconds: float = 0.0
    line: str = ""


class CompileReport:
    """Notices when a step compiles, and reports why.

    Only the thread that dispatches the step counts: other threads compile too, such as
    the writer of a checkpoint. Leave the context, or call `close`, to stop listening.
    """

    def __init__(self) -> None:
        self._thread: int | None = None
        self._seconds = 0.0
        self._inputs: dict[str, str] | None = None
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def __enter__(self) -> "CompileReport":
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    @contextlib.contextmanager
    def watch(
        self, step: int, batch: Any, expected: Sequence[str] = ()
    ) -> Iterator[Compiled]:
        """Watches this thread dispatch one step; the record is complete afterwards."""
        inputs, compiled = describe_arrays(batch), Compiled()
        self._thread, self._seconds = threading.get_ident(), 0.0
        try:
            yield compiled
        finally:
            # Compilations between steps do not count.
            self._thread = None
        compiled.seconds = self._seconds
        if compiled.seconds:
            compiled.line = _line(
                step, compiled.seconds, self._inputs, inputs, expected
            )
        self._inputs = inputs

    def close(self) -> None:
        """Stops listening."""
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        # JAX calls listeners in every thread that compiles.
        if event == _COMPILED and threading.get_ident() == self._thread:
            self._seconds += duration_secs


def describe_arrays(tree: Any) -> dict[str, str]:
    """Dtype and shape of each array or abstract array in a tree, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_of(path): _signature(leaf) for path, leaf in leaves}


def describe_change(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Describes the differences of two results of `describe_arrays` in one line."""
    changed = [
        f"{path} was {old[path]}, now {new[path]}"
        for path in old
        if path in new and old[path] != new[path]
    ]
    gone = [f"{path} {old[path]} is gone" for path in old if path not in new]
    added = [f"{path} {new[path]} is new" for path in new if path not in old]
    return "; ".join(changed + gone + added)


def _line(
    step: int,
    seconds: float,
    old: dict[str, str] | None,
    new: dict[str, str],
    expected: Sequence[str],
) -> str:
    """Describes why a step compiled."""
    if old is None:
        return f"compiled the first step in {seconds:.1f} s"
    change = describe_change(old, new)
    if expected and not change:
        return f"compiled {', '.join(expected)} for step {step} in {seconds:.1f} s"
    reason = change or (
        "the batch is unchanged, so the state or the program of the step changed"
    )
    return f"step {step} compiles again ({seconds:.1f} s): {reason}"


def _signature(leaf: Any) -> str:
    aval = jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


class Trace:
    """Profiles the steps from `observe.profile.start_step` on.

    Enter the context around the loop, so that a run that ends inside the window closes
    the trace.

    Args:
        profile: Window of steps; None records nothing.
    """

    def __init__(
        self, profile: schema.Profile | None, directory: str | os.PathLike[str]
    ) -> None:
        self._window = range(0)
        if profile:
            start = profile.start_step
            self._window = range(start, start + profile.num_steps)
        self._running = False
        self.path = pathlib.Path(directory) / "trace"

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, *reason: object) -> None:
        self._stop()

    def step(
        self, step: int, pending: Any
    ) -> contextlib.AbstractContextManager[object]:
        """Returns the context of a step; starts or ends recording at window edges."""
        inside = step in self._window
        if inside != self._running:
            # Both edges wait, so that the trace holds exactly the steps of the window.
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
