"""Builds a Config from a file, a dict or a ConfigDict, with overrides."""

import contextlib
import difflib
import os
import pathlib
import runpy
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import ml_collections

from zjax import deepspeed, files
from zjax.config import gin, shipped
from zjax.config.model_rules import with_vocabulary
from zjax.config.shipped import find_config, shipped_name
from zjax.errors import ConfigError, Problem, find_fault
from zjax.settings import convert, derived, mappings, schema


def load_config(
    source: schema.Config
    | Mapping[str, Any]
    | ml_collections.ConfigDict
    | str
    | os.PathLike[str],
    *overrides: str | Mapping[str, Any],
    **settings: Any,
) -> schema.Config:
    """Reads the settings of a run.

    Args:
        source: `.py` file with `get_config()`, `.gin` file, name of a config shipped
            with zjax (`quickstart`), `ds_config.json` of DeepSpeed, dict, ConfigDict,
            or Config to change (derived settings are derived anew).
        *overrides: Texts such as `"zero.stage=3"`, or mappings, nested or with dotted
            paths; later overrides win.
        **settings: Sections or top-level settings, which win over `source` and
            `overrides`.

    Returns:
        The frozen config. All types are right; `check_config` checks that a run can
        work.

    Raises:
        ConfigError: Unreadable or failing files, sources without settings, or settings
            that are unknown or of the wrong type (all at once).

    Example:
        >>> load_config({"seed": 1}, "zero.stage=3", num_steps=20).zero.stage
        3
    """
    try:
        values = _read(source)
        changes = [*overrides, settings]
        merged = mappings.merge_overrides(values, changes)
        if name := shipped_name(source):
            given = mappings.merge_overrides({}, changes)
            merged = shipped.give_way(merged, given, name)
        return with_vocabulary(convert.from_mapping(schema.Config, merged))
    except RecursionError:
        problem, remedy = "is nested too deep", "write settings by section"
        kind = type(source).__name__
        raise ConfigError(Problem("config", kind, problem, remedy)) from None


def saved_config(extra: Mapping[str, Any]) -> schema.Config:
    """Settings of a saved run, from the metadata of a checkpoint of any version."""
    return load_config(convert.current(extra.get("config", {})))


def load_beside(tx: Any, source: Any) -> schema.Config:
    """Reads settings as `load_config`; refuses an optimizer section beside a `tx`."""
    if tx is not None:
        deepspeed.check_optimizer_is_given(source)
    return load_config(source)


def _read(source: Any) -> Mapping[str, Any]:
    """Reads a source as nested settings."""
    if isinstance(source, schema.Config):
        return mappings.to_mapping(source)
    if isinstance(source, ml_collections.ConfigDict):
        given = _changed(source.to_dict(), mappings.base().to_dict())
        return mappings.merge({}, given)
    if isinstance(source, Mapping):
        _check_is_ours(source)
        return mappings.merge({}, source)
    if not isinstance(source, str | os.PathLike):
        problem = f"is a {type(source).__name__}, which holds no settings"
        remedy = "give a .py or .gin file, a dict, a ConfigDict or a Config"
        raise ConfigError(Problem("config", source, problem, remedy))
    path = find_config(files.local_path("config", source))
    if path.suffix not in _READERS:
        remedy = "use .py, .gin, or a ds_config.json"
        problem = Problem("config", str(path), "is not a config file", remedy)
        raise ConfigError(problem)
    if fault := find_fault(path):
        raise ConfigError(Problem("config", str(path), fault, _suggest(path)))
    values = _READERS[path.suffix](path)
    if shipped_name(source) and "optimizer" in values:
        values = {**values, "optimizer": derived.as_recipe(values["optimizer"])}
    return values


def _changed(values: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a config file that differ from the settings that it began with."""
    changed = dict[str, Any]()
    for name, value in values.items():
        before = base.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            value = _changed(value, before)
            if not value:
                continue
        if name not in base or type(value) is not type(before) or value != before:
            changed[name] = value
    return changed


def _check_is_ours(values: Mapping[str, Any]) -> None:
    """Refuses keys of DeepSpeed in place of settings."""
    if theirs := [name for name in values if name in deepspeed.THEIRS]:
        problem = f"has keys of DeepSpeed: {', '.join(theirs)}"
        remedy = "write them to a ds_config.json, and give its path"
        kind = type(values).__name__
        raise ConfigError(Problem("config", kind, problem, remedy))


def _suggest(path: pathlib.Path) -> str:
    """Remedy that names the most similar file beside a missing one."""
    folder = path.parent
    names = list[str]()
    with contextlib.suppress(OSError):
        names = os.listdir(folder)
    matches = difflib.get_close_matches(path.name, names, n=1)
    return (
        f"did you mean {folder / matches[0]}?" if matches else "give the path of a file"
    )


def _read_python(path: pathlib.Path) -> Mapping[str, Any]:
    """Runs a Python config file and reads the result of `get_config()`."""
    try:
        make = runpy.run_path(str(path)).get("get_config")
        if make is None:
            remedy = "define it and return zjax.config.base() with your changes"
            problem = Problem("config", str(path), "has no get_config()", remedy)
            raise ConfigError(problem)
        result = make()
    except ConfigError:
        raise
    except Exception as error:  # the file is the user's, and may raise anything
        problem = Problem("config", str(path), _fault(path, error), "correct it there")
        raise ConfigError(problem) from error
    if not isinstance(result, schema.Config | ml_collections.ConfigDict | Mapping):
        kind = type(result).__name__
        remedy = "return zjax.config.base() with your changes"
        problem = Problem("config", str(path), f"gives a {kind}", remedy)
        raise ConfigError(problem)
    return _read(result)


def _fault(path: pathlib.Path, error: Exception) -> str:
    """Describes an error of a config file, with the line of the file."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(path)
    ]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines = [error.lineno]
    where = f" on line {lines[-1]}" if lines else ""
    return f"fails{where} with {type(error).__name__} ({_reason(error)})"


def _reason(error: BaseException) -> str:
    """Message of an exception in one line."""
    if isinstance(error, SyntaxError):
        return error.msg
    first = error.args[0] if error.args else ""
    if isinstance(first, BaseException):  # ConfigDict wraps its KeyError
        return _reason(first)
    text = first if isinstance(error, KeyError) else error
    return " ".join(str(text).split())


def _read_gin(path: pathlib.Path) -> Mapping[str, Any]:
    return gin.read_gin([str(path)])


_READERS: dict[str, Callable[[pathlib.Path], Mapping[str, Any]]] = {
    ".py": _read_python,
    ".gin": _read_gin,
    ".json": deepspeed.read_settings,
}
