"""How Orbax is called: one directory, two items to a checkpoint."""

import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

STATE, INDEX = "state", "index"
"""Items of a checkpoint."""
INDEX_FILE = "metadata"


def make_manager(
    directory: pathlib.Path, keep_last: int, keep_best: int
) -> ocp.CheckpointManager:
    """What writes and removes the checkpoints of a directory.

    Args:
        directory: It is made where it is missing.
        keep_last: Newest checkpoints kept.
        keep_best: Those of lowest loss kept besides.

    Returns:
        Orbax's manager, cleared of what a killed run left half-written.
    """

    def loss(metrics: Mapping[str, float]) -> float:
        return metrics.get("loss", math.inf)

    policies = ocp.checkpoint_managers
    best = policies.BestN(get_metric_fn=loss, reverse=True, n=keep_best)
    options = ocp.CheckpointManagerOptions(
        best_fn=loss,  # without it the losses are forgotten when the process ends
        preservation_policy=policies.AnyPreservationPolicy(
            [policies.LatestN(keep_last), best]
        ),
        cleanup_tmp_directories=True,
    )
    handlers = {
        STATE: ocp.PyTreeCheckpointHandler(),
        INDEX: ocp.JsonCheckpointHandler(INDEX_FILE),
    }
    return ocp.CheckpointManager(directory, options=options, item_handlers=handlers)


def write(
    manager: ocp.CheckpointManager,
    step: int,
    logical: Mapping[str, jax.Array],
    index: Mapping[str, Any],
    metrics: Mapping[str, Any],
) -> None:
    """Starts to write a checkpoint; returns once Orbax has its own copies.

    Args:
        manager: Of the directory.
        step: Its name.
        logical: Arrays by name.
        index: What JSON can hold.
        metrics: By which the best are kept.
    """
    manager.save(
        step,
        args=ocp.args.Composite(
            state=ocp.args.PyTreeSave(dict(logical)),
            index=ocp.args.JsonSave(dict(index)),
        ),
        metrics=dict(metrics),
        force=True,
    )
