"""Which arrays of a batch hold rows, and which are replicated."""

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
    """Applies one function to arrays of rows and another to replicated arrays.

    Args:
        of_rows: Function of an array whose first dim is the batch.
        of_others: Function of a scalar or another replicated array.
        batch: Arrays or their shapes.
        entries: Requirements of the loss, by path.

    Returns:
        A tree of the results.

    Example:
        >>> import numpy as np
        >>> entries = {"table": Entry((3,))}
        >>> batch = {"x": np.ones(4), "table": np.ones(3), "scale": np.ones(())}
        >>> map_rows(lambda x: "rows", lambda x: "all", batch, entries)
        {'scale': 'all', 'table': 'all', 'x': 'rows'}
    """

    def one(keys: Any, x: Any) -> Any:
        has_rows = entries.get(path_of(keys), Entry()).has_rows
        return of_rows(x) if has_rows and len(x.shape) else of_others(x)

    return jax.tree_util.tree_map_with_path(one, batch)


def rows_of(batch: Batch, entries: Entries) -> Iterator[tuple[str, Any]]:
    """Yields path and array of each array of a batch that holds rows."""
    for keys, leaf in jax.tree_util.tree_leaves_with_path(batch):
        path = path_of(keys)
        if len(leaf.shape) and entries.get(path, Entry()).has_rows:
            yield path, leaf


def field_of(path: str, batch: str = "batch") -> str:
    """The name in errors of an array of a batch; its path is empty if it is the batch.

    Example:
        >>> field_of("tokens"), field_of("")
        ('batch/tokens', 'batch')
    """
    return f"{batch}/{path}" if path else batch


def batch_shardings(plan: Plan, batch: Batch, entries: Entries) -> Any:
    """The shardings of a batch.

    Args:
        plan: Plan of the run.
        batch: Arrays or their shapes.
        entries: Requirements of the loss, by path.

    Returns:
        A tree of shardings.
    """
    return map_rows(plan.batch_sharding, lambda x: plan.replicated, batch, entries)
