"""Overrides such as `zero.stage=3`, and merging them into nested settings."""

import ast
import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from zjax.config import convert, derived
from zjax.errors import ConfigError, Problem

PREFIX = "config."
"""Optional prefix of a path, so that flags, bindings and overrides look alike."""


def parse_override(text: str) -> tuple[str, Any]:
    """Splits `path=value`, drops `config.`, and parses the value.

    The value is a Python literal. A string may lack its quotes, a list its brackets:
    `a,b` is a list of two where a list is expected. A float may be `inf`.

    Raises:
        ConfigError: There is no `=`.

    Example:
        >>> parse_override("config.directory=runs/a"), parse_override("zero.stage=3")
        (('directory', 'runs/a'), ('zero.stage', 3))
        >>> parse_override("observe.sinks=console,csv")
        ('observe.sinks', ('console', 'csv'))
    """
    path, equals, value = text.partition("=")
    path = path.strip().removeprefix(PREFIX)
    if not equals or not path:
        remedy = "write path=value, such as zero.stage=3"
        raise ConfigError(Problem("override", text, "is not a setting", remedy))
    return path, _parse_value(convert.type_of(path), value.strip())


def merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merges nested settings, or dotted paths, into nested settings; the changes win.

    Example:
        >>> merge({"zero": {"stage": 1}}, {"zero.stage": 3, "seed": 2})
        {'zero': {'stage': 3}, 'seed': 2}
    """
    merged = dict(values)
    for path, change in changes.items():
        name, _, inner_path = path.partition(".")
        inner = {inner_path: change} if inner_path else change
        if isinstance(inner, Mapping):
            merged[name] = merge(_nested(name, merged.get(name)), inner)
        else:
            merged[name] = derived.as_set(inner)
    return merged


def merge_overrides(
    values: Mapping[str, Any], overrides: Sequence[str | Mapping[str, Any]]
) -> dict[str, Any]:
    """Merges overrides (`zero.stage=3`, or mappings) into settings; the last one wins.

    Raises:
        ConfigError: Texts without `=`, all at once.

    Example:
        >>> merge_overrides({}, ["seed=1", "seed=2"])
        {'seed': 2}
    """
    merged, problems = dict(values), []
    for override in overrides:
        try:
            changes = (
                dict([parse_override(override)])
                if isinstance(override, str)
                else override
            )
        except ConfigError as error:
            problems += error.problems
        else:
            merged = merge(merged, changes)
    if problems:
        raise ConfigError(*problems)
    return merged


def _nested(name: str, value: Any) -> Mapping[str, Any]:
    value = convert.expand_auto(name, value)
    if dataclasses.is_dataclass(value):
        return convert.to_mapping(value)
    return value if isinstance(value, Mapping) else {}


def _parse_value(hint: Any, text: str) -> Any:
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        value = text
    if _is_text(hint) and not isinstance(value, str):
        return text
    if typing.get_origin(hint) is tuple:
        return _parse_list(typing.get_args(hint)[0], value, text)
    if hint is bool and value in ("true", "false"):
        return value == "true"
    if hint is float and value in ("inf", "-inf", "nan"):
        return float(value)
    return value


def _is_text(hint: Any) -> bool:
    """Whether values of a type are strings, of any or of a choice."""
    is_choice = typing.get_origin(hint) is typing.Literal
    return hint is str or (is_choice and isinstance(typing.get_args(hint)[0], str))


def _parse_list(hint: Any, value: Any, text: str) -> Any:
    """A list without brackets: texts between commas, or one value."""
    if text.startswith(("[", "(")) or dataclasses.is_dataclass(hint):
        return value
    if not _is_text(hint):
        return value if isinstance(value, tuple | str) else (value,)
    entries = value if isinstance(value, tuple) else (value,)
    if text[:1] in ("'", '"') and all(isinstance(entry, str) for entry in entries):
        return entries
    return tuple(map(str.strip, text.split(","))) if text else ()
