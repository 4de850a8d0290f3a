"""Writes a step that is finite: arrays by Orbax, then the index, then the checksums."""

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

_PARAMETERS = ("master/", "params/", "ema/", "extra/replicas/master/")
_NUM_NAMED = 3


def check_finite(
    leaves: Mapping[str, Any], plans: Mapping[str, ArrayPlan], step: int
) -> None:
    """Refuses parameters that are not finite, and NaN in other arrays.

    An optimizer or a model may keep infinity on purpose, such as a best loss. Frozen
    parameters do not change, and are not read. Offloaded arrays are staged on the
    devices one after another.

    Example:
        >>> check_finite({}, {}, 10)
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
"""How long the process waits at exit for threads of a failed save."""
_PROCESS_SUMS = ".sums-"
"""Prefix of the files with which processes pass their checksums to the first."""
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
    """Starts writing a step in a daemon thread."""
    copied = threading.Event()

    def write() -> None:
        try:
            _write(partial, arrays, index, linked, commit, copied.set)
        finally:
            copied.set()

    written = Task("checkpoint", write)
    _unfinished.add(written)
    if wait_for_copies:
        copied.wait()
    return written


def wait_for_write(written: Task) -> None:
    """Waits for the task of `start_write`, and raises its error."""
    try:
        written.result()
    finally:
        _unfinished.discard(written)


def barrier_name(partial: pathlib.Path, name: str) -> str:
    """A barrier name that is unique in the run."""
    return f"zjax-checkpoint{partial.name}-{name}"


def _write(
    partial: pathlib.Path,
    arrays: Mapping[str, jax.Array],
    index: str,
    linked: Sequence[str],
    commit: Callable[[], None],
    on_copied: Callable[[], None],
) -> None:
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
            if jax.process_index():
                found = sums.sum_files(partial, [*_local_files(partial), *linked])
                sums.write_sums(
                    partial / f"{_PROCESS_SUMS}{jax.process_index()}", found
                )
        with barrier(barrier_name(partial, "commit")):
            if jax.process_index() == 0:
                handler.finalize(epath.Path(state))
                _finish(partial, index)
                commit()
    finally:
        handler.close()


def _finish(partial: pathlib.Path, index: str) -> None:
    (partial / steps.INDEX).write_text(index)
    known: dict[str, Sum] = {}
    for path in partial.glob(f"{_PROCESS_SUMS}*"):
        known |= sums.read_sums(path)
        path.unlink()
    others = [name for name in sums.list_files(partial) if name not in known]
    known |= sums.sum_files(partial, others)
    missing = sums.find_missing(partial, known)
    if missing:
        raise OSError(missing)
    sums.write_sums(partial / SUMS_FILE, dict(sorted(known.items())))


def _local_files(partial: pathlib.Path) -> list[str]:
    """Files that this process wrote; the first process sums up all others."""
    import orbax.checkpoint as ocp

    number = ocp.multihost.process_index()
    starts = (
        f"{steps.STATE}/ocdbt.process_{number}/",
        f"{steps.STATE}/array_metadatas/process_{number}",
    )
    return [n for n in sums.list_files(partial) if n.startswith(starts)]


def _run(coroutine: Any) -> Any:
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


@atexit.register
def _finish_at_exit() -> None:
    """Waits for unfinished saves, logs their errors, and lets Orbax's threads end.

    Orbax's threads run on for a moment after one has failed; Python aborts if they call
    it while it shuts down.
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
