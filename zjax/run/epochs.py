"""Counts the rows of a run, so that epochs become steps."""

import dataclasses
from typing import Any

from zjax.data.batches import (
    ColumnDataset,
    ColumnRows,
    batches_problems,
    with_columns,
)
from zjax.data.source import open_rows
from zjax.errors import ConfigError, Problem
from zjax.run.batch import with_batch_sizes
from zjax.schedule.lengths import beside_problems, epoch_problems, steps_of
from zjax.settings import schema
from zjax.settings.ranges import range_problems


def end_by_epochs(
    config: schema.Config, batches: Any, num_devices: int
) -> tuple[schema.Config, str]:
    """Replaces `num_epochs` by the `num_steps` that draw as many rows.

    Returns the settings with `num_epochs=0` and a description of the count; unchanged
    settings and an empty text without epochs.
    """
    epochs = config.num_epochs
    if not epochs:
        return config, ""
    # Runs before the config is checked.
    problems = [*range_problems(config), *beside_problems(config)]
    problems += epoch_problems(config, user_batches=batches is not None)
    problems += batches_problems("batches", batches)
    if problems:
        raise ConfigError(*problems)
    num_rows = _count_rows(config, batches)
    size = config.global_batch_size
    # 0 leaves the batch size to the number of devices.
    size = size or with_batch_sizes(config, num_devices).global_batch_size
    num_steps = steps_of(epochs, num_rows, size)
    counted = dataclasses.replace(config, num_steps=num_steps, num_epochs=0.0)
    text = f"num_epochs={epochs:g} of {num_rows:,} rows: {num_steps:,} steps"
    return counted, text


def _count_rows(config: schema.Config, batches: Any) -> int:
    """Counts the training rows of a run."""
    if batches is None:
        return len(open_rows(config, "train"))
    given = with_columns(batches)
    if isinstance(given, ColumnDataset):
        return len(ColumnRows(given))
    problem = "needs the number of rows, which ready batches do not say"
    remedy = "set num_steps, or give a dataset or a list of rows"
    raise ConfigError(Problem("num_epochs", config.num_epochs, problem, remedy))
