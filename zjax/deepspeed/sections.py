"""Converts all sections of a ds_config, in the order in which sections are read."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from zjax import files
from zjax.deepspeed.conversion import Conversion
from zjax.deepspeed.efficiency import convert_efficiency
from zjax.deepspeed.known import KNOWN, SECTIONS
from zjax.deepspeed.optimizer import convert_optimizer
from zjax.deepspeed.precision import convert_precision
from zjax.deepspeed.reading import DEEP, read_file
from zjax.deepspeed.steps import convert_others, convert_parallel, convert_steps
from zjax.deepspeed.strict import check_strict
from zjax.deepspeed.zero import convert_zero
from zjax.errors import ConfigError, Problem
from zjax.settings import convert as override


def convert(values: Any) -> Conversion:
    """Converts the keys and values of a ds_config as DeepSpeed 0.19 reads it.

    Refuses values that are no mapping; problems of keys are in the result.

    Example:
        >>> found = convert({"train_batch_size": 64, "zero_optimization": {"stage": 2}})
        >>> found.settings["zero.stage"], found.settings["global_batch_size"]
        (2, 64)
        >>> [row.verdict for row in found.rows][:2]
        ['mapped', 'mapped']
    """
    remedy = "give the keys and values of a ds_config.json"
    if not isinstance(values, Mapping):
        problem = f"is a {type(values).__name__}"
        raise ConfigError(Problem("ds_config", values, problem, remedy))
    try:
        found = Conversion(values)
    except RecursionError as error:
        problem = Problem("ds_config", [*values], DEEP, remedy)
        raise ConfigError(problem) from error
    # Strict checks go first: a converter that skips a section hides wrong keys in it.
    found.check_sections(SECTIONS)
    check_strict(found)
    convert_steps(found)
    convert_optimizer(found)
    convert_precision(found)
    convert_zero(found)
    convert_parallel(found)
    convert_efficiency(found)
    convert_others(found)
    found.finish(KNOWN)
    return found


def read_settings(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Nested settings of a ds_config.json; raises all problems of the file at once."""
    found = _read(path)
    if problems := found.problems():
        raise ConfigError(*problems)
    return override.merge({}, found.settings)


def check_optimizer_is_given(source: Any) -> None:
    """Refuses a ds_config whose optimizer or scheduler a user's optimizer replaces.

    Sources of settings other than a ds_config.json pass.
    """
    is_path = isinstance(source, str | os.PathLike)
    if not is_path or pathlib.PurePath(os.fspath(source)).suffix != ".json":
        return
    found = _read(source)
    sections = [name for name in ("optimizer", "scheduler") if found.given(name)]
    for name in sections:
        problem = "has no effect on the optimizer that was given"
        remedy = "leave the section out, or give None as the optimizer"
        found.require(name, problem, remedy)
    if sections:
        raise ConfigError(*found.problems())


def _read(path: str | os.PathLike[str]) -> Conversion:
    """Reads and converts a file."""
    return convert(read_file(pathlib.Path(files.local_path("ds_config", path))))
