"""Writes a finite state as a step: arrays by Orbax, then the index, then checksums."""

import asyncio
import atexit
import contextlib
import pathlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging

from zjax.checkpoint import steps, sums
from zjax.checkpoint.sums import SUMS_FILE, Sum, Task
from zjax.errors import NonFiniteError, Problem
from zjax.processes.barrier import barrier
from zjax.sharding.placement import ArrayPlan
from zjax.storage.move import to_devices
from zjax.weights.saved import CRITIC

_OWN = ("master/", "params/", "ema/", "extra/replicas/master/")
_PARAMETERS = (*_OWN, *(f"{CRITIC}/{prefix}" for prefix in _OWN))
"""Prefixes of arrays that must be finite, not only free of NaN."""
_NUM_NAMED = 3


def check_finite(
    leaves: Mapping[str, Any], plans: Mapping[str, ArrayPlan], step: int
) -> None:
    """Refuses parameters that are not finite, and NaN in other arrays.

    An optimizer or a model may keep infinity on purpose, such as a best loss. Frozen
    parameters do not change, and are not read. Offloaded arrays are staged on the
    devices one after another.
    """
    floating = {
        name: plan
        for name, plan in plans.items()
        if jnp.issubdtype(leaves[name].dtype, jnp.floating) and not plan.is_frozen
    }
    resident = {n: leaves[n] for n, plan in floating.items() if plan.is_on_device}
    flags: dict[str, Any] = _are_fine(resident)
    for name, plan in floating.items():
        if name not in resident:
            staged = to_devices(leaves[name], plan, is_consumed=False)
            flags |= jax.block_until_ready(_are_fine({name: staged}))
            # Frees the device copy before the next array is staged.
            staged.delete()
    names = [name for name, is_fine in jax.device_get(flags).items() if not is_fine]
    if names:
        shown = ", ".join(names[:_NUM_NAMED])
        others = len(names) - _NUM_NAMED
        shown += f" and {others} more" if others > 0 else ""
        problem = f"is not finite after step {step}, and is not saved"
        remedy = "go back to the newest checkpoint, and lower "
        remedy += "optimizer.peak_learning_rate or look at the data"
        raise NonFiniteError(Problem("state", shown, problem, remedy))


@jax.jit
def _are_fine(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: _is_fine(name, x) for name, x in arrays.items()}


def _is_fine(name: str, x: jax.Array) -> jax.Array:
    if name.startswith(_PARAMETERS):
        return jnp.isfinite(x).all()
    return ~jnp.isnan(x).any()


_LAST_SECONDS = 20.0
"""Seconds that the process waits at exit for threads of a failed save."""
_PROCESS_SUMS = ".sums-"
"""Prefix of the files that carry checksums of other processes to process 0."""
_unfinished: set[Task] = set()


def start_write(
    partial: pathlib.Path,
    arrays: Mapping[str, jax.Array],
    index: str,
    linked: Sequence[str],
    commit: Callable[[], None],
    *,
    wait_for_copies: bool,
) -> Task:
    """Starts writing a step in a daemon thread, and returns the task.

    The task ends when the step is renamed, or with an error of any process. With
    `wait_for_copies`, the call returns only once Orbax has copied the arrays.
    """
    copied = threading.Event()

    def write() -> None:
        try:
            _write(partial, arrays, index, linked, commit, copied.set)
        finally:
            # Also after an error, or the caller would wait for ever.
            copied.set()

    written = Task("checkpoint", write)
    _unfinished.add(written)
    if wait_for_copies:
        copied.wait()
    return written


def wait_for_write(written: Task) -> None:
    """Waits for the task of `start_write`, and raises the error of the task."""
    try:
        written.result()
    finally:
        _unfinished.discard(written)


def barrier_name(partial: pathlib.Path, name: str) -> str:
    """Returns a barrier name that is unique in the run."""
    return f"zjax-checkpoint{partial.name}-{name}"


def _write(
    partial: pathlib.Path,
    arrays: Mapping[str, jax.Array],
    index: str,
    linked: Sequence[str],
    commit: Callable[[], None],
    on_copied: Callable[[], None],
) -> None:
    """Writes arrays, index and checksums, and commits; all processes take part."""
    import orbax.checkpoint as ocp
    from etils import epath

    handler = ocp.PyTreeCheckpointHandler()
    state = partial / steps.STATE
    try:
        with barrier(barrier_name(partial, "write")):
            commits = _run(
                handler.async_save(
                    epath.Path(state), args=ocp.args.PyTreeSave(dict(arrays))
                )
            )
            on_copied()
            for each in commits or ():
                each.result()
            # Each process reads its own files back; process 0 reads all other files.
            if jax.process_index():
                found = sums.sum_files(partial, [*_local_files(partial), *linked])
                sums.write_sums(
                    partial / f"{_PROCESS_SUMS}{jax.process_index()}", found
                )
        with barrier(barrier_name(partial, "commit")):
            if jax.process_index() == 0:
                # Before checksums: Orbax merges the files of all processes here.
                handler.finalize(epath.Path(state))
                _finish(partial, index)
                commit()
    finally:
        handler.close()


def _finish(partial: pathlib.Path, index: str) -> None:
    """Writes the index, and merges the checksums of all processes."""
    (partial / steps.INDEX).write_text(index)
    known: dict[str, Sum] = {}
    for path in partial.glob(f"{_PROCESS_SUMS}*"):
        known |= sums.read_sums(path)
        path.unlink()
    others = [name for name in sums.list_files(partial) if name not in known]
    known |= sums.sum_files(partial, others)
    # A step is committed only if process 0 sees the files of all processes.
    missing = sums.find_missing(partial, known)
    if missing:
        raise OSError(missing)
    sums.write_sums(partial / SUMS_FILE, dict(sorted(known.items())))


def _local_files(partial: pathlib.Path) -> list[str]:
    """Names of the files that this process wrote, by Orbax's naming."""
    import orbax.checkpoint as ocp

    number = ocp.multihost.process_index()
    starts = (
        f"{steps.STATE}/ocdbt.process_{number}/",
        f"{steps.STATE}/array_metadatas/process_{number}",
    )
    return [n for n in sums.list_files(partial) if n.startswith(starts)]


def _run(coroutine: Any) -> Any:
    """Runs a coroutine to the end; this thread has no event loop."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


@atexit.register
def _finish_at_exit() -> None:
    """Waits for unfinished saves, logs errors, and lets Orbax's threads end.

    Orbax's threads run on for a moment after a failure; Python aborts if such a thread
    calls into the interpreter during shutdown.
    """
    for written in tuple(_unfinished):
        try:
            written.result()
        except Exception as error:
            logging.error("a checkpoint that nobody waited for is lost: %s", error)
    end = time.monotonic() + _LAST_SECONDS
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("orbax."):
            with contextlib.suppress(Exception):  # logged above; `join` raises it again
                thread.join(max(0.0, end - time.monotonic()))
