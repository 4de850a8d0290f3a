"""Which arrays of a batch hold rows, and which every device has whole."""

from collections.abc import Callable, Iterator
from typing import Any

import jax

from zjax.sharding.paths import path_of
from zjax.sharding.plan import Plan
from zjax.typing import Batch, Entries, Entry


def map_rows(
    of_rows: Callable[[Any], Any],
    of_others: Callable[[Any], Any],
    batch: Batch,
    entries: Entries,
) -> Any:
    """Applies one function to arrays of rows, and another to all others.

    Args:
        of_rows: Takes an array whose first dim is the batch.
        of_others: Takes a scalar, or an array that is replicated.
        batch: Arrays or their shapes.
        entries: What the loss asks of them.

    Returns:
        A tree of the results.

    Example:
        >>> import numpy as np
        >>> entries = {"table": Entry((3,))}
        >>> batch = {"x": np.ones(4), "table": np.ones(3), "scale": np.ones(())}
        >>> map_rows(lambda x: "rows", lambda x: "whole", batch, entries)
        {'scale': 'whole', 'table': 'whole', 'x': 'rows'}
    """

    def one(keys: Any, x: Any) -> Any:
        has_rows = entries.get(path_of(keys), Entry()).has_rows
        return of_rows(x) if has_rows and len(x.shape) else of_others(x)

    return jax.tree_util.tree_map_with_path(one, batch)


def rows_of(batch: Batch, entries: Entries) -> Iterator[tuple[str, Any]]:
    """The arrays of a batch that hold rows.

    Args:
        batch: Arrays or their shapes.
        entries: What the loss asks of them.

    Yields:
        Paths and arrays.
    """
    for keys, leaf in jax.tree_util.tree_leaves_with_path(batch):
        path = path_of(keys)
        if len(leaf.shape) and entries.get(path, Entry()).has_rows:
            yield path, leaf


def field_of(path: str, batch: str = "batch") -> str:
    """What errors call an array of a batch.

    Args:
        path: In the batch; empty where the batch is one array.
        batch: Name of the batch.

    Returns:
        Such as `batch/tokens`.

    Example:
        >>> field_of("tokens"), field_of("")
        ('batch/tokens', 'batch')
    """
    return f"{batch}/{path}" if path else batch


def batch_shardings(plan: Plan, batch: Batch, entries: Entries) -> Any:
    """The placement of a batch.

    Args:
        plan: Of the run.
        batch: Arrays or their shapes.
        entries: What the loss asks of them.

    Returns:
        A tree of shardings.
    """
    return map_rows(plan.batch_sharding, lambda x: plan.replicated, batch, entries)
