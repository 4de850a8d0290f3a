"""Converts mappings, overrides and function names to a Config, with strict types."""

import ast
import dataclasses
import difflib
import importlib
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import ml_collections

from zjax import files
from zjax.errors import ConfigError, Problem
from zjax.settings import axes, derived, schema

Section = TypeVar("Section")

_MAX_ENTRIES = 10_000
"""Largest number of entries of a list-valued setting."""


def base() -> ml_collections.ConfigDict:
    """All settings at defaults, as a ConfigDict for a config file to change.

    Types are not enforced while the file runs: `from_mapping` reports every mistake at
    once.

    Example:
        >>> base().zero.stage
        1
    """
    return ml_collections.ConfigDict(to_mapping(schema.Config()), type_safe=False)


def from_mapping(section: type[Section], values: Mapping[str, Any]) -> Section:
    """Builds a section of the schema from plain values, or raises all problems at once.

    An int is accepted for a float; otherwise types must match exactly. Nested sections
    may be mappings or instances.

    Example:
        >>> from_mapping(schema.Zero, {"stage": 3}).stage
        3
        >>> from_mapping(schema.Zero, {"stagee": 1})
        Traceback (most recent call last):
        zjax.errors.ConfigError: stagee=1 is not a setting; did you mean stage?
    """
    problems: list[Problem] = []
    built = _section(section, values, "", problems)
    if problems:
        raise ConfigError(*problems)
    return built


def to_mapping(section: Any) -> dict[str, Any]:
    """Converts a section to nested dicts, the inverse of `from_mapping`.

    Tuples stay tuples, and derived values stay marked.

    Example:
        >>> to_mapping(schema.Config())["zero"]["stage"]
        1
    """
    return dataclasses.asdict(section, dict_factory=_tables_to_dicts)


def _tables_to_dicts(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Dict factory that turns name tables into dicts."""
    return {
        name: dict(value) if isinstance(value, schema.NameTable) else value
        for name, value in fields
    }


def expand_auto(path: str, value: Any) -> Any:
    """Sizes that `mesh="auto"` stands for; other values pass unchanged.

    Example:
        >>> expand_auto("mesh", "auto")
        {'pipeline': 0, 'sequence': 0, 'tensor': 0}
    """
    is_auto = (path, value) == ("mesh", axes.AUTO)
    return dict.fromkeys(axes.OPEN_AXES, 0) if is_auto else value


def type_of(path: str) -> Any:
    """Type annotation of a setting, such as `zero.stage`; None for an unknown setting.

    Example:
        >>> type_of("optimizer.clip_norm")
        <class 'float'>
    """
    hint: Any = schema.Config
    for name in path.split("."):
        hints = typing.get_type_hints(hint) if dataclasses.is_dataclass(hint) else {}
        hint = hints.get(name)
    return hint


def _section(section: Any, values: Any, path: str, problems: list[Problem]) -> Any:
    """Builds a section from a mapping or instance; appends problems."""
    if isinstance(values, section):
        values = {f.name: getattr(values, f.name) for f in dataclasses.fields(values)}
    values, hints = expand_auto(path, values), typing.get_type_hints(section)
    if not isinstance(values, Mapping):
        word = f"{axes.AUTO!r}, or " if section is schema.Mesh else ""
        expected = f"{word}a mapping with any of {', '.join(hints)}"
        _refuse_type(path, values, expected, problems)
        return values
    arguments, before = {}, len(problems)
    defaults = {field.name: field.default for field in dataclasses.fields(section)}
    for name, value in values.items():
        field = f"{path}.{name}" if path else f"{name}"
        if isinstance(value, Mapping) and dataclasses.is_dataclass(hints.get(name)):
            # A mapping changes the default of this field, not of the section's class.
            value = _special_defaults(defaults[name]) | dict(value)
        if name in hints:
            arguments[name] = _value(hints[name], value, field, problems)
        else:
            remedy = _nearest(f"{name}", list(hints), path)
            problems.append(Problem(field, value, "is not a setting", remedy))
    # A section of wrong types could fail in `__post_init__`.
    return section(**arguments) if len(problems) == before else section()


def _special_defaults(section: Any) -> dict[str, Any]:
    """Settings with another default in this section than in the section's class."""
    usual = type(section)()
    values = {x.name: getattr(section, x.name) for x in dataclasses.fields(section)}
    return {n: x for n, x in values.items() if x != getattr(usual, n)}


def _nearest(name: str, known: list[str], path: str) -> str:
    """Remedy that names the most similar setting, or lists all."""
    matches = difflib.get_close_matches(name, known, n=1)
    if matches:
        return f"did you mean {path}{'.' if path else ''}{matches[0]}?"
    return f"use one of {', '.join(known)}"


def _value(hint: Any, value: Any, field: str, problems: list[Problem]) -> Any:
    """Converts a value to the annotated type; appends a problem if it does not fit."""
    # Derived values are derived anew, from the settings of this config.
    value = derived.reset(value)
    if dataclasses.is_dataclass(hint):
        return _section(hint, value, field, problems)
    if typing.get_origin(hint) is typing.Literal:
        return _choice(typing.get_args(hint), value, field, problems)
    if hint is schema.NameTable:
        return _names(value, field, problems)
    if isinstance(hint, types.UnionType):
        one, many = typing.get_args(hint)
        is_tuple = isinstance(value, list | tuple)
        return _value(many if is_tuple else one, value, field, problems)
    if typing.get_origin(hint) is tuple:
        return _tuple(typing.get_args(hint)[0], value, field, problems)
    if hint is float and type(value) is int:
        # `type(value) is int` excludes bool, which is a subclass of int.
        return float(value)
    is_marked = derived.is_offered(value) or derived.is_recipe(value)
    if type(value) is not hint and not (is_marked and isinstance(value, hint)):
        expected = "bool: True or False" if hint is bool else hint.__name__
        _refuse_type(field, value, expected, problems)
    elif hint is float and math.isnan(value):
        problems.append(Problem(field, value, "is not a number", "use a number"))
    elif (setting := re.sub(r"\[\d+\]", "", field)) in files.SETTINGS:
        return _path(value, field, setting, problems)
    return value


def _path(value: str, field: str, setting: str, problems: list[Problem]) -> str:
    """Expands a local path; appends a problem if the path is unusable."""
    if not value and setting in (*files.OPTIONAL, *files.CHECKED_LATER):
        return value
    try:
        return files.local_path(field, value)
    except ConfigError as error:
        problems += error.problems
        return value


def _choice(
    choices: tuple[Any, ...], value: Any, field: str, problems: list[Problem]
) -> Any:
    """Checks a value against the choices of a Literal."""
    # Types are compared as well: True == 1, but zero.stage=True is refused.
    if (type(value), value) not in [(type(choice), choice) for choice in choices]:
        remedy = f"use one of {', '.join(str(x) or repr(x) for x in choices)}"
        problems.append(Problem(field, value, "is not a choice", remedy))
    return value


def _tuple(hint: Any, value: Any, field: str, problems: list[Problem]) -> Any:
    """Converts each entry of a list, up to `_MAX_ENTRIES`."""
    if not isinstance(value, list | tuple):
        _refuse_type(field, value, "list or tuple", problems)
        return value
    if len(value) > _MAX_ENTRIES:
        problem, remedy = (
            f"has {len(value):,} entries",
            f"use at most {_MAX_ENTRIES:,}",
        )
        problems.append(Problem(field, "...", problem, remedy))
        return ()
    entries = enumerate(map(derived.as_set, value))
    return tuple(_value(hint, v, f"{field}[{i}]", problems) for i, v in entries)


def _names(value: Any, field: str, problems: list[Problem]) -> Any:
    """Converts a mapping of names to a hashable `NameTable`."""
    if isinstance(value, schema.NameTable):
        return value
    if not isinstance(value, Mapping):
        _refuse_type(field, value, "a mapping of names to names", problems)
        return value
    for name, meaning in value.items():
        entry = f"{field}[{name!r}]"
        if not isinstance(name, str):
            problem, remedy = "has a key that is not a str", "use names of dims as keys"
            problems.append(Problem(entry, meaning, problem, remedy))
        elif not isinstance(meaning, str):
            expected = "str, or '' for a dim that is not split"
            _refuse_type(entry, meaning, expected, problems)
    return schema.NameTable(sorted(value.items(), key=str))


def _refuse_type(
    field: str, value: Any, expected: str, problems: list[Problem]
) -> None:
    """Appends the problem of a value of the wrong type."""
    kind = type(value).__name__
    article = "an" if kind[0].lower() in "aeiou" else "a"
    problems.append(
        Problem(field, value, f"is {article} {kind}", f"expected {expected}")
    )


_NAME = re.compile(r"[\w.]+:\w+")


class Fault(NamedTuple):
    """Reason why a function cannot be used, with the remedy."""

    problem: str
    remedy: str


def is_function_name(name: str) -> bool:
    """Whether a text has the form `module:function`.

    Example:
        >>> is_function_name("math:sqrt"), is_function_name("sqrt")
        (True, False)
    """
    return _NAME.fullmatch(name) is not None


def find_function(name: str) -> Callable[..., Any] | Fault:
    """Imports a function by the name `module:function`, or returns the fault.

    Example:
        >>> find_function("math:fsum")([1, 2])
        3.0
        >>> find_function("math:nothing").problem
        'names no function'
    """
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute, None)
    # Importing runs the user's module, which may raise anything.
    except Exception as error:
        problem = f"cannot be imported ({type(error).__name__}: {error})"
        return Fault(problem, "run where Python finds the module, or mend it")
    if not callable(function):
        return Fault("names no function", f"define {attribute} in {module}")
    return function


PREFIX = "config."
"""Optional prefix of a path, which makes flags, bindings and overrides alike."""


def parse_override(text: str) -> tuple[str, Any]:
    """Splits `path=value`, drops `config.`, and parses the value.

    The value is a Python literal. A string may lack quotes, a list may lack brackets:
    `a,b` is a list of two where a list is expected. A float may be `inf`.

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
    return path, _parse_value(type_of(path), value.strip())


def merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merges nested settings, or dotted paths, into nested settings; changes win.

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
    """Merges overrides (`zero.stage=3`, or mappings) into settings; the last wins.

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
    """Settings of a section as a mapping; empty for a value that is no section."""
    value = expand_auto(name, value)
    if dataclasses.is_dataclass(value):
        return to_mapping(value)
    return value if isinstance(value, Mapping) else {}


def _parse_value(hint: Any, text: str) -> Any:
    """Parses text as a Python literal if the annotated type allows."""
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
    """Whether a type is str or a choice of strings."""
    is_choice = typing.get_origin(hint) is typing.Literal
    return hint is str or (is_choice and isinstance(typing.get_args(hint)[0], str))


def _parse_list(hint: Any, value: Any, text: str) -> Any:
    """Parses a list that may lack brackets: texts between commas, or one value."""
    if text.startswith(("[", "(")) or dataclasses.is_dataclass(hint):
        return value
    # The literal parser has already split numbers at commas.
    if not _is_text(hint):
        return value if isinstance(value, tuple | str) else (value,)
    entries = value if isinstance(value, tuple) else (value,)
    if text[:1] in ("'", '"') and all(isinstance(entry, str) for entry in entries):
        return entries
    return tuple(map(str.strip, text.split(","))) if text else ()
