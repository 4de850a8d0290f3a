"""Reads Gin files and bindings as plain settings, without Gin's registry.

Gin sets values but never wires code. Gin's parser reads the text and nothing is
registered: a program's own use of Gin is not affected, references (`@name`) reach
nothing, and all mistakes are reported at once.
"""

import math
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
from zjax.settings import convert, mappings, schema

VALUES_ONLY = "set values only: config.section.name = value"
Bindings = list[tuple[str, Any]]
"""Path and value of each binding; a path without a dot defines a macro."""


class _Name(NamedTuple):
    """Use of a macro (`%name`), or reference to code (`@name`)."""

    text: str


class _Delegate(config_parser.ParserDelegate):
    """Turns references and macros into data for Gin's parser."""

    def configurable_reference(self, scoped_configurable_name, evaluate) -> Any:
        return _Name(f"@{scoped_configurable_name}{'()' * evaluate}")

    def macro(self, macro_name) -> Any:
        return _Name(f"%{macro_name}")


def read_gin(files: Sequence[str] = (), bindings: Sequence[str] = ()) -> dict[str, Any]:
    """Reads Gin files in order, then single bindings; the last value wins.

    Infinity is written `%inf`, tuples as in Python. Paths of includes are relative to
    the including file. The result is nested by section, and not yet checked.

    Example:
        >>> read_gin(bindings=["config.zero.stage = 3"])
        {'zero': {'stage': 3}}
    """
    problems: list[Problem] = []
    found: Bindings = []
    try:
        for path in files:
            local = pathlib.Path(paths.local_path("gin_file", path))
            found += _read_file(local, problems)
        for binding in bindings:
            found += _read_text(binding, "gin", pathlib.Path(), problems)
        values = _nest(found, problems)
    except (RecursionError, MemoryError):
        field, given = ("gin_file", files) if files else ("gin", bindings)
        problem = "is nested too deep"
        remedy = "remove brackets, and includes and macros that reach themselves"
        raise ConfigError(Problem(field, given[0], problem, remedy)) from None
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
        bound = {
            path.removeprefix(mappings.PREFIX): None
            for binding in bindings
            for path, _ in _read_text(binding, "gin", pathlib.Path(), [])
            if path.startswith(mappings.PREFIX)
        }
        values = shipped.give_way(values, mappings.merge({}, bound), name)
    return with_vocabulary(convert.from_mapping(schema.Config, values))


def _read_file(path: pathlib.Path, problems: list[Problem]) -> Bindings:
    """Reads the bindings of a file and of included files."""
    try:
        text = paths.read_text(path)
    except (OSError, ValueError) as error:
        problem = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        remedy = "give the path of a Gin file"
        problems.append(Problem("gin_file", str(path), problem, remedy))
        return []
    return _read_text(text, str(path), path.parent, problems)


def _read_text(
    text: str, source: str, folder: pathlib.Path, problems: list[Problem]
) -> Bindings:
    """Reads the bindings of a text, whose includes lie in a folder."""
    found: Bindings = []
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
            name = paths.local_path("include", statement.filename)
            found += _read_file(folder / name, problems)
        elif isinstance(statement, config_parser.ImportStatement):
            problem = Problem("import", statement.module, "would run code", VALUES_ONLY)
            problems.append(problem)
    return found


def _statements(text: str, source: str, problems: list[Problem]) -> Iterator[Any]:
    """Yields statements of Gin's parser; appends a problem for a syntax error."""
    try:
        yield from config_parser.ConfigParser(text, _Delegate())
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


def _nest(found: Bindings, problems: list[Problem]) -> dict[str, Any]:
    """Nests bindings by section, with macros expanded; appends problems."""
    # Gin has no literal for infinity.
    macros = {"inf": math.inf} | {path: x for path, x in found if "." not in path}
    used, values = {"inf"}, dict[str, Any]()

    def expand(value: Any, path: str) -> Any:
        if isinstance(value, dict):
            return {key: expand(item, path) for key, item in value.items()}
        if isinstance(value, _Name):
            kind, name = value.text[0], value.text[1:]
            if kind == "%" and name in macros:
                used.add(name)
                return expand(macros[name], path)
            problem, remedy = "is not a macro", f"define it: {name} = ..."
            if kind == "@":
                problem, remedy = "refers to code", VALUES_ONLY
            problems.append(Problem(path, value.text, problem, remedy))
        elif isinstance(value, list | tuple):
            return type(value)(expand(item, path) for item in value)
        return value

    for path, value in found:
        if path.startswith(mappings.PREFIX):
            setting = path.removeprefix(mappings.PREFIX)
            values = mappings.merge(values, {setting: expand(value, path)})
        elif "." in path:
            remedy, value = (
                f"did you mean {mappings.PREFIX}{path}?",
                expand(value, path),
            )
            problems.append(Problem(path, value, "is not a setting", remedy))
    for name in sorted(set(macros) - used):
        remedy = f"write config.{name} if it is a setting"
        problems.append(Problem(name, macros[name], "is an unused macro", remedy))
    return values
