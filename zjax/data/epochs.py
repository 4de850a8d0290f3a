"""Counts the training rows, whose epochs may be the length of a run."""

import dataclasses
from typing import Any

from zjax.config import schema
from zjax.config.epochs import beside_problems, epoch_problems, steps_of
from zjax.config.ranges import range_problems
from zjax.data import batches as wrapping
from zjax.data import source
from zjax.errors import ConfigError, Problem
from zjax.sharding.mesh import with_batch_sizes


def end_by_epochs(
    config: schema.Config, batches: Any, num_devices: int
) -> tuple[schema.Config, str]:
    """Replaces `num_epochs` by the `num_steps` that draw as many rows.

    Args:
        config: Settings of the right types.
        batches: Training data of the caller, as for `wrap_batches`; None for the
            configured data.
        num_devices: Devices of the run, 1 or more.

    Returns:
        The settings with `num_epochs=0`, and a description of what was counted; the
        same settings and an empty text without epochs.

    Raises:
        ConfigError: The settings or the batches give no number of rows by step.
        DataError: The data is missing, damaged or too short for one row.
    """
    epochs = config.num_epochs
    if not epochs:
        return config, ""
    problems = [*range_problems(config), *beside_problems(config)]
    problems += epoch_problems(config, user_batches=batches is not None)
    problems += wrapping.batches_problems("batches", batches)
    if problems:
        raise ConfigError(*problems)
    num_rows = _count_rows(config, batches)
    size = config.global_batch_size
    size = size or with_batch_sizes(config, num_devices).global_batch_size
    num_steps = steps_of(epochs, num_rows, size)
    counted = dataclasses.replace(config, num_steps=num_steps, num_epochs=0.0)
    text = f"num_epochs={epochs:g} of {num_rows:,} rows: {num_steps:,} steps"
    return counted, text


def _count_rows(config: schema.Config, batches: Any) -> int:
    """Counts the training rows of a run."""
    if batches is None:
        return len(source.open_rows(config, "train"))
    given = wrapping.with_columns(batches)
    if isinstance(given, wrapping.ColumnDataset):
        return len(wrapping.ColumnRows(given))
    problem = "needs the number of rows, which ready batches do not say"
    remedy = "set num_steps, or give a dataset or a list of rows"
    raise ConfigError(Problem("num_epochs", config.num_epochs, problem, remedy))
