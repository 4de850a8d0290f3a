"""How a step gets to its files: arrays by Orbax, then the index, then checksums."""

import asyncio
import atexit
import json
import pathlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from absl import logging

from zjax.checkpoint import steps, sums
from zjax.checkpoint.sums import SUMS_FILE, Sum
from zjax.checkpoint.threads import Task
from zjax.processes.together import together

_LAST_SECONDS = 20.0
"""That threads of a failed save have before the process ends without them."""
_SUMS_OF = ".sums-"
"""Files in which the others tell the first process the checksums of theirs."""
_unfinished: set[Task] = set()


def start_writing(
    partial: pathlib.Path,
    logical: Mapping[str, jax.Array],
    index: Mapping[str, Any],
    linked: Sequence[str],
    commit: Callable[[], None],
    *,
    wait_for_copies: bool,
) -> Task:
    """Starts to write a step in a thread that ends with the process.

    Args:
        partial: A directory of `steps.begin`, which may hold linked files already.
        logical: Arrays by name.
        index: What JSON can hold.
        linked: Files of this process that are there already.
        commit: Called by the first process once all is written and kept.
        wait_for_copies: Whether to return only once Orbax has its own copies.

    Returns:
        Done once the step has its name, or with an error: that of this process, or of
        another one.
    """
    copied = threading.Event()

    def write() -> None:
        try:
            _write(partial, logical, index, linked, commit, copied.set)
        finally:
            copied.set()

    written = Task("checkpoint", write)
    _unfinished.add(written)
    if wait_for_copies:
        copied.wait()
    return written


def wait_for(written: Task) -> None:
    """Waits for `start_writing`, and raises its error.

    Args:
        written: What it returned.
    """
    try:
        written.result()
    finally:
        _unfinished.discard(written)


def meeting(partial: pathlib.Path, name: str) -> str:
    """Names a part of a save for `together`.

    Args:
        partial: The directory of the save, another one for each: a process that has
            failed at one of its parts is at those of the next save all the same.
        name: What is done; all do it once in each save.

    Returns:
        A name that no other part of a run has.
    """
    return f"zjax-checkpoint{partial.name}-{name}"


def _write(
    partial: pathlib.Path,
    logical: Mapping[str, jax.Array],
    index: Mapping[str, Any],
    linked: Sequence[str],
    commit: Callable[[], None],
    tell_copied: Callable[[], None],
) -> None:
    import orbax.checkpoint as ocp
    from etils import epath

    handler = ocp.PyTreeCheckpointHandler()
    state = partial / steps.STATE
    try:
        with together(meeting(partial, "write")):
            commits = _run(
                handler.async_save(
                    epath.Path(state), args=ocp.args.PyTreeSave(dict(logical))
                )
            )
            tell_copied()
            for each in commits or ():
                each.result()
            if jax.process_index():
                found = sums.sum_files(partial, [*_own_files(partial), *linked])
                sums.write_sums(partial / f"{_SUMS_OF}{jax.process_index()}", found)
        with together(meeting(partial, "commit")):
            if jax.process_index() == 0:
                handler.finalize(epath.Path(state))
                _finish(partial, index)
                commit()
    finally:
        handler.close()


def _finish(partial: pathlib.Path, index: Mapping[str, Any]) -> None:
    (partial / steps.INDEX).write_text(json.dumps(index))
    known: dict[str, Sum] = {}
    for path in partial.glob(f"{_SUMS_OF}*"):
        known |= sums.read_sums(path)
        path.unlink()
    rest = [name for name in sums.list_files(partial) if name not in known]
    known |= sums.sum_files(partial, rest)
    missing = sums.find_missing(partial, known)
    if missing:
        raise OSError(missing)
    sums.write_sums(partial / SUMS_FILE, dict(sorted(known.items())))


def _own_files(partial: pathlib.Path) -> list[str]:
    """What this process has written; what it cannot tell apart the first one reads."""
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
    """Says what is lost where nobody has waited for a save, and lets threads end.

    Those of Orbax go on for a moment after one of them has failed; where they come back
    to Python while it ends, it aborts.
    """
    for written in tuple(_unfinished):
        try:
            written.result()
        except Exception as error:
            logging.error("a checkpoint is lost, for which nobody waited: %s", error)
    end = time.monotonic() + _LAST_SECONDS
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("orbax."):
            thread.join(max(0.0, end - time.monotonic()))
