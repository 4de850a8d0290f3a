"""Reads Gin files and bindings as plain settings, without Gin's registry.

Gin sets values but never wires code. Gin's parser reads the text and nothing is
registered: a program's own use of Gin is not affected, references (`@name`) reach
nothing, and all mistakes are reported at once.
"""

import math
import os
import pathlib
import tokenize
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from gin import config_parser

from zjax import files as paths
from zjax.config import shipped
from zjax.config.model_rules import with_vocabulary
from zjax.config.shipped import shipped_name
from zjax.errors import ConfigError, Problem
from zjax.files import read_text
from zjax.settings import convert, schema

MAX_FILES = 100
"""Largest number of files read, counting repeated includes."""
MAX_VALUES = 10_000
"""Largest number of values after macro expansion."""
VALUES_ONLY = "set values only: config.section.name = value"


class _Macro(NamedTuple):
    """Use of a macro, `%name`."""

    name: str


class _Reference(NamedTuple):
    """Reference to code, `@name`, which is refused."""

    name: str


class _Budget:
    """Counts the files and values that may still be read.

    Includes and macros can grow exponentially.
    """

    def __init__(self) -> None:
        self._files, self._values = MAX_FILES, MAX_VALUES

    def take_file(self, path: pathlib.Path) -> None:
        self._files -= 1
        if self._files < 0:
            problem, remedy = f"is file {MAX_FILES + 1}", "include fewer"
            raise ConfigError(Problem("include", str(path), problem, remedy))

    def take_value(self, path: str) -> None:
        self._values -= 1
        if self._values < 0:
            problem = f"expands to more than {MAX_VALUES:,} values by macros"
            raise ConfigError(Problem(path, "...", problem, "write the values out"))


class _Delegate(config_parser.ParserDelegate):
    """Turns references and macros into data for Gin's parser."""

    def configurable_reference(self, scoped_configurable_name, evaluate) -> Any:
        return _Reference(scoped_configurable_name + "()" * evaluate)

    def macro(self, macro_name) -> Any:
        return _Macro(macro_name)


def read_gin(files: Sequence[str] = (), bindings: Sequence[str] = ()) -> dict[str, Any]:
    """Reads Gin files in order, then single bindings; the last value wins.

    Infinity is written `%inf`, tuples as in Python. Paths of includes are relative to
    the including file. The result is nested by section, and not yet checked.

    Example:
        >>> read_gin(bindings=["config.zero.stage = 3"])
        {'zero': {'stage': 3}}
    """
    try:
        return _read_all(files, bindings)
    except RecursionError:
        given = files[0] if files else bindings[0]
        problem, remedy = "is nested too deep", "write config.section.name = value"
        field = "gin_file" if files else "gin"
        raise ConfigError(Problem(field, given, problem, remedy)) from None


def _read_all(files: Sequence[str], bindings: Sequence[str]) -> dict[str, Any]:
    """Reads statements, expands macros and nests settings, or raises all problems."""
    problems: list[Problem] = []
    found: list[tuple[str, Any]] = []
    budget = _Budget()
    for path in files:
        local = paths.local_path("gin_file", path)
        found += _read_file(pathlib.Path(local), (), problems, budget)
    for binding in bindings:
        found += _read_text(binding, "gin", (), problems, budget)
    # Gin has no literal for infinity.
    macros = {"inf": math.inf}
    # `NAME = value`, a name without a dot, defines a macro.
    macros |= {path: value for path, value in found if "." not in path}
    unused = set(macros) - {"inf"}
    values: dict[str, Any] = {}
    for path, value in found:
        if "." in path:
            resolved = _resolve(value, path, macros, unused, problems, budget)
            values = _bind(values, path, resolved, problems)
    for name in sorted(unused):
        remedy = f"write config.{name} if it is a setting"
        problems.append(Problem(name, macros[name], "is an unused macro", remedy))
    if problems:
        raise ConfigError(*problems)
    return values


def from_gin(files: Sequence[str] = (), bindings: Sequence[str] = ()) -> schema.Config:
    """Builds a Config from Gin files and bindings, as `read_gin` reads them.

    Example:
        >>> from_gin(bindings=["config.zero.stage = 3"]).zero.stage
        3
    """
    values = read_gin(files, bindings)
    if len(files) == 1 and (name := shipped_name(files[0])):
        values = shipped.give_way(values, _bound(bindings), name)
    return with_vocabulary(convert.from_mapping(schema.Config, values))


def _bound(bindings: Sequence[str]) -> dict[str, Any]:
    """Nests the settings that readable bindings set, with values of None."""
    found = [
        path.removeprefix(convert.PREFIX)
        for binding in bindings
        for path, _ in _read_text(binding, "gin", (), [], _Budget())
        if path.startswith(convert.PREFIX)
    ]
    return convert.merge({}, dict.fromkeys(found))


def _read_file(
    path: pathlib.Path,
    parents: tuple[pathlib.Path, ...],
    problems: list[Problem],
    budget: _Budget,
) -> list[tuple[str, Any]]:
    """Reads path and value of each binding of a file and of included files."""
    budget.take_file(path)
    if os.path.realpath(path) in map(os.path.realpath, parents):
        names = " -> ".join(map(str, (*parents, path)))
        problems.append(
            Problem("include", str(path), f"includes itself: {names}", "remove one")
        )
        return []
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        remedy = "give the path of a Gin file"
        problem = f"cannot be read: {reason}"
        problems.append(Problem("gin_file", str(path), problem, remedy))
        return []
    return _read_text(text, str(path), (*parents, path), problems, budget)


def _read_text(
    text: str,
    source: str,
    parents: tuple[pathlib.Path, ...],
    problems: list[Problem],
    budget: _Budget,
) -> list[tuple[str, Any]]:
    """Reads path and value of each binding of a text; appends problems."""
    found: list[tuple[str, Any]] = []
    for statement in _statements(text, source, problems):
        if isinstance(statement, config_parser.BindingStatement):
            scope, selector, name, value, _ = statement
            path = f"{selector}.{name}" if name else selector
            if scope:
                place = f"{scope}/{path}"
                problems.append(Problem(place, value, "has a Gin scope", VALUES_ONLY))
            else:
                found.append((path, value))
        elif isinstance(statement, config_parser.IncludeStatement):
            folder = parents[-1].parent if parents else pathlib.Path()
            name = paths.local_path("include", statement.filename)
            found += _read_file(folder / name, parents, problems, budget)
        elif isinstance(statement, config_parser.ImportStatement):
            problem = Problem("import", statement.module, "would run code", VALUES_ONLY)
            problems.append(problem)
    return found


def _statements(text: str, source: str, problems: list[Problem]) -> Iterator[Any]:
    """Yields statements of Gin's parser; appends a problem for a syntax error."""
    try:
        yield from config_parser.ConfigParser(text, _Delegate())
    except (RecursionError, MemoryError):
        remedy = "write config.section.name = value"
        problems.append(Problem(source, text, "is nested too deep", remedy))
    except (SyntaxError, tokenize.TokenError, ValueError) as error:
        line = getattr(error, "lineno", None)
        if isinstance(error, tokenize.TokenError):
            line = error.args[1][0]
        reason = str(error.args[0]).splitlines()[0].rstrip(".")
        if "malformed node" in reason:
            reason = "a string lacks its quotes, or a macro its %"
        lines = text.splitlines()
        value = lines[min(line or 1, len(lines)) - 1].strip()
        field = source if len(lines) == 1 else f"{source}:{line}"
        remedy = "write config.section.name = value, strings in quotes"
        problems.append(Problem(field, value, f"is not Gin: {reason}", remedy))


def _resolve(
    value: Any,
    path: str,
    macros: dict[str, Any],
    unused: set[str],
    problems: list[Problem],
    budget: _Budget,
    seen: tuple[str, ...] = (),
) -> Any:
    """Expands macros in a value; appends problems of references."""

    def inner(item):
        return _resolve(item, path, macros, unused, problems, budget, seen)

    budget.take_value(path)
    if isinstance(value, _Reference):
        problems.append(Problem(path, f"@{value.name}", "refers to code", VALUES_ONLY))
    elif isinstance(value, _Macro):
        unused.discard(value.name)
        if value.name in macros and value.name not in seen:
            again = (*seen, value.name)
            macro = macros[value.name]
            return _resolve(macro, path, macros, unused, problems, budget, again)
        remedy = f"define it: {value.name} = ..."
        problems.append(Problem(path, f"%{value.name}", "is not a macro", remedy))
    elif isinstance(value, dict):
        return {key: inner(item) for key, item in value.items()}
    elif isinstance(value, list | tuple):
        return type(value)(inner(item) for item in value)
    return value


def _bind(
    values: dict[str, Any], path: str, value: Any, problems: list[Problem]
) -> dict[str, Any]:
    """Merges a resolved binding into nested settings."""
    if path.startswith(convert.PREFIX):
        return convert.merge(values, {path.removeprefix(convert.PREFIX): value})
    remedy = f"did you mean {convert.PREFIX}{path}?"
    problems.append(Problem(path, value, "is not a setting", remedy))
    return values
