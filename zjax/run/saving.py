"""Saves and restores checkpoints of runs with the user's own training loop."""

import functools
import os
import sys
from collections.abc import Mapping
from typing import Any

import jax

from zjax.checkpoint.steps import format_index, unsaved_extra
from zjax.checkpoint.store import Store
from zjax.errors import CheckpointError, Problem
from zjax.files import local_path
from zjax.processes import member_files
from zjax.replicas.state import saved_rows, saved_state
from zjax.run import resume
from zjax.run.build import Run
from zjax.train.state import TrainState, with_params


def save(
    directory: str | os.PathLike[str],
    state: TrainState,
    run: Run,
    *,
    extra: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
) -> None:
    """Writes a checkpoint of a state, and returns once the files are on disk.

    `zjax.restore` reads the checkpoint on any devices, mesh or ZeRO stage. All
    processes of a run call `save`, on a shared file system.

    Args:
        directory: Directory of the checkpoints, named by step; created if missing.
        state: State of this run, after more steps than any checkpoint there; not
            consumed.
        run: Result of `zjax.initialize`.
        extra: JSON values by string, such as the position in your data; at most 256 MiB
            together with the names of all arrays.
        keep_last: Number of newest checkpoints to keep, 1 or more; None keeps all.

    Raises:
        CheckpointError: The checkpoint could not be written, the directory holds a
            later one, a gradient is pending, or an argument is invalid.
        ProcessError: Another process writes into the directory.
        StateError: The state was consumed.

    Example:
        >>> import tempfile, jax.numpy as jnp, optax, zjax
        >>> def loss_fn(model, batch, key):
        ...     return jnp.mean((model(batch["x"]) - 1.0) ** 2)
        >>> model = lambda key: {"w": jnp.zeros((4, 1))}, lambda w, x: x @ w["w"]
        >>> batch = {"x": jnp.ones((8, 4))}
        >>> run = zjax.initialize(model, optax.sgd(0.1), loss_fn, batch)
        >>> state, _ = run.step(run.state, batch)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     zjax.save(directory, state, run, extra={"epoch": 2})
        ...     state, extra = zjax.restore(directory, run)
        >>> int(state.step), extra
        (1, {'epoch': 2})
    """
    _check(extra, keep_last)
    path = local_path("directory", directory, CheckpointError)
    rows, saved = saved_rows(run.plan, run.config), saved_state(state, run.plan)
    step = int(state.step)
    metadata = {"given": dict(extra or {})}
    metadata |= resume.describe_run(run.config, run.plan, rows, run.functions, step)
    with member_files.hold(path):
        store = Store(path, keep_last=keep_last or sys.maxsize, keep_best=0)
        store.save(step, saved, rows, extra=metadata)
        store.close()


def restore(
    directory: str | os.PathLike[str], run: Run, *, step: int | None = None
) -> tuple[TrainState, dict[str, Any]]:
    """Reads a checkpoint of `zjax.save`, each array directly into the run's shards.

    Logs settings that differ from the saved run, and a model, loss or optimizer that
    computes something else.

    Args:
        directory: Directory of the checkpoints.
        run: Run of the saved model and optimizer, on any devices; `run.state` is
            consumed, so that the devices hold one state only.
        step: Step of the checkpoint; None for the newest.

    Returns:
        The state, and the `extra` saved with it.

    Raises:
        CheckpointError: There is no such checkpoint or directory, the checkpoint has
            another model or optimizer, or a file is damaged; `run.state` is unchanged.
    """
    rows = saved_rows(run.plan, run.config)

    def free_memory() -> None:
        for leaf in jax.tree.leaves(run.state):
            leaf.delete()

    store = Store(local_path("directory", directory, CheckpointError))
    step = store.resolve(step)
    resume.check_messages(store.extra(step), run.config, step)
    saved, metadata = store.restore(
        rows,
        step,
        keeps_errors=functools.partial(resume.errors_fit, rows, run.config),
        # Called after all checks: an error leaves `run.state` intact.
        free_memory=free_memory,
    )
    state = with_params(saved, run.plan)
    resume.report_changes(metadata, run.config, int(state.step))
    resume.report_functions(metadata, run.functions)
    return state, metadata.get("given", {})


def _check(extra: Any, keep_last: int | None) -> None:
    """Refuses values that JSON cannot hold, and `keep_last` below 1."""
    problems = []
    if keep_last is not None and keep_last < 1:
        remedy = "use 1 or more, or None to keep all"
        problems.append(Problem("keep_last", keep_last, "keeps no checkpoint", remedy))
    try:
        format_index(dict(extra or {}))
    except (TypeError, ValueError) as error:  # `dict` raises both
        problems += unsaved_extra(extra, error).problems
    if problems:
        raise CheckpointError(*problems)
