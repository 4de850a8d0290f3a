"""Converts nested mappings to a Config, with strict types."""

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from zjax import files
from zjax.errors import ConfigError, Problem
from zjax.settings import axes, choices, derived, mappings, renamed, schema, translate
from zjax.settings.choices import KIND, NONE

Section = TypeVar("Section")


def from_mapping(section: type[Section], values: Mapping[str, Any]) -> Section:
    """Builds a section of the schema from plain values, or raises all problems at once.

    An int is accepted for a float; otherwise types must match exactly. Nested sections
    may be mappings or instances.
    """
    problems: list[Problem] = []
    if section is schema.Config:
        values, problems = translate.with_present_names(values)
    built = _section(section, values, "", problems)
    if problems:
        raise ConfigError(*problems)
    return built


class Unread(Problem):
    """Problem of a changed setting that a choice does not read."""


def unread(values: Mapping[str, Any]) -> list[Problem]:
    """Problems of changed settings that the choices of a config do not read."""
    problems: list[Problem] = []
    _section(schema.Config, values, "", problems)
    return [problem for problem in problems if isinstance(problem, Unread)]


def current(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a saved run by present names, without settings that nothing reads."""
    present, _ = translate.with_present_names(values, is_record=True)
    return _readable(schema.Config, present)


def _readable(section: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Copies nested settings of a section without settings of choices not taken."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        hint = choices.hints(section).get(name)
        if (kinds := choices.kinds(hint)) and isinstance(value, Mapping):
            default = choices.default_of(section, name)
            kind = value.get(KIND) or _implied(kinds, value, default)
            hint, known = kinds.get(kind), _all_settings_of(kinds)
            unread = {*known} - {*_settings_of(hint)}
            # Sections that are the only one of a choice have no kind.
            unread |= set() if hasattr(hint, KIND) else {KIND}
            value = {n: x for n, x in value.items() if n not in unread}
            value = value if hint else None
        if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
            value = _readable(hint, value)
        if typing.get_origin(hint) is tuple and isinstance(value, list | tuple):
            entry = typing.get_args(hint)[0]
            is_section = dataclasses.is_dataclass(entry)
            value = [_readable(entry, x) for x in value] if is_section else value
        result[name] = value
    return result


def _section(section: Any, values: Any, path: str, problems: list[Problem]) -> Any:
    """Builds a section from a mapping or instance; appends problems."""
    values, hints = _fields(values, section), choices.hints(section)
    values = mappings.expand_auto(path, values)
    if not isinstance(values, Mapping):
        word = f"{axes.AUTO!r}, or " if section is schema.Mesh else ""
        expected = f"{word}a mapping with any of {', '.join(hints)}"
        _refuse_type(path, values, expected, problems)
        return values
    arguments, before = {}, len(problems)
    defaults = {field.name: field.default for field in dataclasses.fields(section)}
    for name, value in values.items():
        field = f"{path}.{name}" if path else f"{name}"
        hint = hints.get(name)
        if isinstance(value, Mapping) and dataclasses.is_dataclass(hint):
            # A mapping changes the default of this field, not of the section's class.
            value = _special_defaults(defaults[name]) | dict(value)
        if name in hints:
            default = defaults[name]
            arguments[name] = _value(hints[name], value, field, problems, default)
        else:
            remedy = _nearest(f"{name}", list(hints), path)
            problems.append(Problem(field, value, "is not a setting", remedy))
    # A section of wrong types could fail in `__post_init__`.
    return section(**arguments) if len(problems) == before else section()


def _fields(value: Any, section: type) -> Any:
    """Settings of an instance of a section; other values pass unchanged."""
    if not isinstance(value, section):
        return value
    return {name: getattr(value, name) for name in choices.names(section)}


def _choose(
    hint: Any, value: Any, path: str, problems: list[Problem], default: Any
) -> Any:
    """Converts a choice between sections; appends problems of unread settings."""
    kinds = choices.kinds(hint)
    given = choices.as_mapping(value)
    if type(value) in kinds.values():
        given = {KIND: choices.kind_of(type(value)), **_fields(value, type(value))}
    if not isinstance(given, Mapping):
        expected = f"one of {', '.join(kinds)}, or a mapping with a {KIND}"
        _refuse_type(path, value, expected, problems)
        return default
    given = dict(given)
    kind = given.pop(KIND, None) or _implied(kinds, given, default)
    if not isinstance(kind, str) or kind not in kinds:
        remedy = f"use one of {', '.join(kinds)}"
        named = value if kind == NONE else kind
        problems.append(Problem(path, named, "is not a choice", remedy))
        return default
    section, known = kinds[kind], _all_settings_of(kinds)
    special = {} if default is None else _special_defaults(default)
    unread = {*known} - {*_settings_of(section)}
    for name in [name for name in given if name in unread]:
        x, field = given.pop(name), f"{path}.{name}"
        tables = (special, name), (renamed.UNREAD, field)
        unset = [table[key] for table, key in tables if key in table]
        if derived.reset(x) not in unset:
            problems += _unread(kinds, kind, field, x)
    if section is None:
        for name, x in given.items():
            problem, remedy = "is not a setting", _nearest(name, known, path)
            problems.append(Problem(f"{path}.{name}", x, problem, remedy))
        return None
    given = {n: x for n, x in special.items() if n in _settings_of(section)} | given
    return _section(section, given, path, problems)


def _unread(
    kinds: Mapping[str, type | None], kind: str, path: str, value: Any
) -> Iterator[Problem]:
    """Yields problems of a changed setting that a choice does not read."""
    choice, _, name = path.rpartition(".")
    readers = choices.readers(kinds, name)
    reader = typing.cast(type, kinds[readers[0]])
    default = choices.default_of(reader, name)
    mistakes: list[Problem] = []
    converted = _value(choices.hints(reader)[name], value, path, mistakes, default)
    if not mistakes and converted == default:
        return
    changed = {path: value if mistakes else converted}
    if isinstance(value, Mapping):
        inside = {f"{path}.{name}": x for name, x in value.items() if name != KIND}
        changed = inside or {path: value.get(KIND)}
    for field, x in changed.items():
        problem = f"has no effect with {choice}={None if kind == NONE else kind!r}"
        remedy = f"leave it out, or set {choice} to {' or '.join(map(repr, readers))}"
        yield Unread(field, x, problem, remedy)


def _settings_of(section: type | None) -> list[str]:
    """Names of the settings of a section; none of None."""
    return choices.names(section) if section else []


def _all_settings_of(kinds: Mapping[str, type | None]) -> list[str]:
    """Names of the settings of all sections of a choice."""
    return sorted({name for one in kinds.values() for name in _settings_of(one)})


def _implied(kinds: Mapping[str, Any], given: Mapping[str, Any], default: Any) -> str:
    """Kind of a choice that names none: the default, or the usual or only section."""
    if default is not None:
        return choices.kind_of(type(default))
    sections = {kind: one for kind, one in kinds.items() if one}
    usual = [kind for kind, one in sections.items() if getattr(one, "is_usual", False)]
    usual += sections if len(sections) == 1 else []
    return usual[0] if given and usual else NONE


def _special_defaults(section: Any) -> dict[str, Any]:
    """Settings with another default in this section than in the section's class."""
    usual = type(section)()
    values = _fields(section, type(section))
    return {n: x for n, x in values.items() if x != getattr(usual, n)}


def _nearest(name: str, known: list[str], path: str) -> str:
    """Remedy that names the most similar setting, or lists all."""
    matches = difflib.get_close_matches(name, known, n=1)
    if matches:
        return f"did you mean {path}{'.' if path else ''}{matches[0]}?"
    return f"use one of {', '.join(known)}"


def _value(
    hint: Any, value: Any, field: str, problems: list[Problem], default: Any = None
) -> Any:
    """Converts a value to the annotated type; appends a problem if it does not fit."""
    # Derived values are derived anew, from the settings of this config.
    value = derived.reset(value)
    if choices.kinds(hint):
        return _choose(hint, value, field, problems, default)
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
    """Converts each entry of a list."""
    if not isinstance(value, list | tuple):
        _refuse_type(field, value, "list or tuple", problems)
        return value
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
