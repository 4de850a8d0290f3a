"""Reads a ds_config.json, by the table of all sections."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from zjax import files
from zjax.deepspeed import batch, efficiency, optimizer, others, precision, zero
from zjax.deepspeed.reading import read_file
from zjax.deepspeed.table import Conversion
from zjax.errors import ConfigError, Problem
from zjax.settings.mappings import merge

TABLE = (
    *batch.SECTIONS,
    *optimizer.SECTIONS,
    *precision.SECTIONS,
    *zero.SECTIONS,
    *efficiency.SECTIONS,
    *others.SECTIONS,
)
"""Sections of a ds_config, in the order in which settings are made."""
THEIRS = (
    *(*batch.SIZES, "gradient_clipping", "steps_per_print"),
    *("scheduler", "fp16", "bf16", zero.ZERO),
)
"""Keys of DeepSpeed that are not settings of zjax."""


def convert(values: Any) -> Conversion:
    """Converts the keys and values of a ds_config as DeepSpeed 0.19 reads it."""
    if not isinstance(values, Mapping):
        remedy = "give the keys and values of a ds_config.json"
        problem = f"is a {type(values).__name__}"
        raise ConfigError(Problem("ds_config", values, problem, remedy))
    return Conversion(values, TABLE)


def read(path: str | os.PathLike[str]) -> Conversion:
    """Reads and converts a ds_config.json."""
    return convert(read_file(pathlib.Path(files.local_path("ds_config", path))))


def read_settings(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Nested settings of a ds_config.json; raises all problems of the file at once."""
    found = read(path)
    if problems := found.problems():
        raise ConfigError(*problems)
    return merge({}, found.settings)


def check_optimizer_is_given(source: Any) -> None:
    """Refuses an optimizer or scheduler that a user's optimizer replaces.

    Sources of settings other than a ds_config.json pass.
    """
    is_path = isinstance(source, str | os.PathLike)
    if not is_path or pathlib.PurePath(os.fspath(source)).suffix != ".json":
        return
    found = read(source)
    sections = [name for name in ("optimizer", "scheduler") if found.given(name)]
    for name in sections:
        problem = "has no effect on the optimizer that was given"
        remedy = "leave the section out, or give None as the optimizer"
        found.need(name, problem, remedy)
    if sections:
        raise ConfigError(*found.problems())
