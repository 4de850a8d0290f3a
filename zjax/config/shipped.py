"""Finds configs shipped with zjax by name, and adapts them to a user's changes."""

import difflib
import math
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from absl import logging

from zjax.config import check, effect
from zjax.errors import ConfigError, Problem
from zjax.settings import axes, choices, convert, derived, renamed, schema, translate

_PACKAGE = pathlib.Path(__file__).parents[1]
# Installed packages hold the configs; in a checkout the folder lies beside zjax.
_FOLDERS = (_PACKAGE / "configs", _PACKAGE.parent / "configs")


def find_config(source: str) -> pathlib.Path:
    """Path of a config file, from a path or the name of a shipped config.

    Example:
        >>> find_config("quickstart").name, str(find_config("configs/mine.py"))
        ('quickstart.py', 'configs/mine.py')
    """
    path = pathlib.Path(source)
    if path.suffix or path.name != source:
        return path
    folder = next(filter(pathlib.Path.is_dir, _FOLDERS), _FOLDERS[0])
    names = {file.stem: file for file in folder.glob("*.py")}
    if source in names:
        return names[source]
    (near,) = difflib.get_close_matches(source, names, n=1) or [""]
    remedy = f"did you mean {near}?" if near else "give the path of a .py or .gin file"
    problem = "is not the name of a config of zjax"
    raise ConfigError(Problem("config", source, problem, remedy))


def shipped_name(source: object) -> str:
    """Name of a shipped config, given by name or path; empty for any other source."""
    if not isinstance(source, str | os.PathLike):
        return ""
    path = find_config(os.fspath(source)).absolute()
    return path.stem if path.parent in _FOLDERS else ""


_SIZES = ("num_microbatches", "microbatch_size")
"""Batch settings that are derived from the mesh if 0."""


def give_way(
    merged: dict[str, Any], changes: Mapping[str, Any], name: str
) -> dict[str, Any]:
    """Drops settings of a shipped config that a user's settings make impossible.

    A setting is dropped if it has no effect beside the user's settings, or if it
    contradicts them and would be derived if nobody set it. The log names each dropped
    setting. No setting of the user is dropped. `merged` holds both, `changes` the
    user's settings alone.

    Example:
        >>> merged = {"model": {"num_heads": 4, "num_kv_heads": 8, "embed_size": 64}}
        >>> give_way(merged, {"model": {"num_heads": 4}}, "llama_8b")
        {'model': {'num_heads': 4, 'embed_size': 64}}
    """
    present, problems = translate.with_present_names(merged)
    if problems:  # the caller reads the config, which reports all problems at once
        return merged
    merged = present
    given = set(_given(changes))
    merged = _without_unread(merged, given, name)
    # Each round may uncover new problems; a setting is tried once, which ends the loop.
    tried = set(given)
    while given:
        config = convert.from_mapping(schema.Config, merged)
        named = {
            field: problem
            for field, problem in _named_in_problems(config)
            if _holds(merged, field) and not _is_among(tried, field)
        }
        if not named:
            break
        tried |= set(named)
        defaults = convert.from_mapping(schema.Config, _without(merged, named))
        follow = {field for field in named if _follows(config, defaults, field)}
        without = convert.from_mapping(schema.Config, _without(merged, follow))
        left = {problem.field for problem in _problems(without)}
        dropped = [field for field in follow if named[field].field not in left]
        merged = _without(merged, dropped)
        for field in sorted(dropped):
            other, text = named[field], "%s=%r of %s gives way and is %r: %s=%r %s"
            values = (
                choices.value_at(config, field),
                name,
                choices.value_at(without, field),
            )
            logging.warning(
                text, field, *values, other.field, other.value, other.problem
            )
    return merged


def _without_unread(
    merged: dict[str, Any], given: set[str], name: str
) -> dict[str, Any]:
    """Drops settings of a shipped config that choices of the user do not read."""
    dropped = [x for x in convert.unread(merged) if not given & {*_prefixes(x.field)}]
    for problem in dropped:
        text = "%s=%r of %s gives way: it %s"
        logging.warning(text, problem.field, problem.value, name, problem.problem)
    return _without(merged, [problem.field for problem in dropped])


def _follows(config: schema.Config, defaults: schema.Config, field: str) -> bool:
    """Whether a setting would be derived or unread, with another value than now."""
    unread = {problem.field for problem in effect.effect_problems(config, 1)}
    default = choices.value_at(defaults, field)
    follows = field in unread or field in _SIZES or derived.is_derived(default)
    return follows and default != choices.value_at(config, field)


def _named_in_problems(config: schema.Config) -> Iterator[tuple[str, Problem]]:
    """Yields settings that problems of a config name, each with the problem."""
    for problem in _problems(config):
        for field in re.findall(r"([a-z_.]+)=", f"{problem.problem} {problem.field}="):
            yield field, problem


def _problems(config: schema.Config) -> tuple[Problem, ...]:
    """Problems of a config on as many devices as the mesh names."""
    sizes = (getattr(config.mesh, axis) for axis in axes.AXES)
    try:
        check.check_config(config, math.prod(size for size in sizes if size > 0))
    except ConfigError as error:
        return error.problems
    return ()


def _paths(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields dotted paths of a nested mapping; a section that is no mapping is one."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _given(changes: Mapping[str, Any]) -> Iterator[str]:
    """Yields present paths of the settings that a user changes."""
    kept, olds = renamed.find(changes)
    yield from _paths(kept)
    yield from (old.path for old in olds)


def _prefixes(field: str) -> Iterator[str]:
    """Yields a setting and the sections around it."""
    while field:
        yield field
        field = field.rpartition(".")[0]


def _holds(values: Any, field: str) -> bool:
    """Whether a nested mapping holds a setting or a section."""
    for name in field.split("."):
        if not isinstance(values, Mapping) or name not in values:
            return False
        values = values[name]
    return True


def _is_among(fields: Iterable[str], field: str) -> bool:
    """Whether fields have a setting, a section around it, or a setting inside it."""
    around = {*_prefixes(field)}
    return any(x in around or x.startswith(f"{field}.") for x in fields)


def _without(values: Mapping[str, Any], fields: Iterable[str]) -> dict[str, Any]:
    """Copies a nested mapping without some settings."""
    inner: dict[str, list[str]] = {}
    for field in fields:
        name, _, rest = field.partition(".")
        inner.setdefault(name, []).append(rest)
    return {
        name: _without(value, inner[name]) if name in inner else value
        for name, value in values.items()
        if inner.get(name) != [""]
    }
