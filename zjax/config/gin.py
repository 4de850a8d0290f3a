"""Reads Gin files and bindings as plain settings, without Gin's registry.

Gin sets values but never wires code. Gin's parser reads the text and nothing is
registered: a program's own use of Gin is not affected, references (`@name`) reach
nothing, and all mistakes are reported at once.
"""

import itertools
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
from zjax.settings import convert, mappings, schema

MAX_FILES = 100
MAX_VALUES = 10_000
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
    """
    problems, found = list[Problem](), Bindings()
    reader = _Reader(problems)
    try:
        for path in files:
            local = pathlib.Path(paths.local_path("gin_file", path))
            found += reader.read_file(local)
        for binding in bindings:
            found += reader.read_text(binding, "gin")
        values = _nest(found, problems)
    except (RecursionError, MemoryError):
        field, given = ("gin_file", files) if files else ("gin", bindings)
        problem = "is nested too deep"
        remedy = "nest fewer brackets, and fewer macros in macros"
        raise ConfigError(Problem(field, given[0], problem, remedy)) from None
    if problems:
        raise ConfigError(*problems)
    return values


def from_gin(files: Sequence[str] = (), bindings: Sequence[str] = ()) -> schema.Config:
    """Builds a Config from Gin files and bindings, as `read_gin` reads them."""
    values = read_gin(files, bindings)
    if len(files) == 1 and (name := shipped_name(files[0])):
        bound = {
            path.removeprefix(mappings.PREFIX): None
            for binding in bindings
            for path, _ in _Reader([]).read_text(binding, "gin")
            if path.startswith(mappings.PREFIX)
        }
        values = shipped.give_way(values, mappings.merge({}, bound), name)
    return with_vocabulary(convert.from_mapping(schema.Config, values))


class _Reader:
    """Reads bindings of texts and of a limited number of files; appends problems."""

    def __init__(self, problems: list[Problem]):
        self._problems, self._numbers = problems, itertools.count(1)

    def read_file(
        self, path: pathlib.Path, parents: Sequence[pathlib.Path] = ()
    ) -> Bindings:
        """Reads the bindings of a file inside others, and of files that it includes."""
        # Includes can grow exponentially.
        if (number := next(self._numbers)) > MAX_FILES:
            problem, remedy = f"is file {number}", "include fewer"
            raise ConfigError(Problem("include", str(path), problem, remedy))
        chain = [*parents, path]
        if os.path.realpath(path) in map(os.path.realpath, parents):
            problem = f"includes itself: {' -> '.join(map(str, chain))}"
            self._problems.append(Problem("include", str(path), problem, "remove one"))
            return []
        try:
            text = paths.read_text(path)
        except (OSError, ValueError) as error:
            problem = f"cannot be read: {getattr(error, 'strerror', None) or error}"
            remedy = "give the path of a Gin file"
            self._problems.append(Problem("gin_file", str(path), problem, remedy))
            return []
        return self.read_text(text, str(path), chain)

    def read_text(
        self, text: str, source: str, files: Sequence[pathlib.Path] = ()
    ) -> Bindings:
        """Reads the bindings of a text, whose includes lie beside the last file."""
        problems, found = self._problems, Bindings()
        for statement in _statements(text, source, problems):
            if isinstance(statement, config_parser.BindingStatement):
                scope, selector, name, value, _ = statement
                path = f"{selector}.{name}" if name else selector
                if scope:
                    place, problem = f"{scope}/{path}", "has a Gin scope"
                    problems.append(Problem(place, value, problem, VALUES_ONLY))
                else:
                    found.append((path, value))
            elif isinstance(statement, config_parser.IncludeStatement):
                folder = files[-1].parent if files else pathlib.Path()
                name = paths.local_path("include", statement.filename)
                found += self.read_file(folder / name, files)
            elif isinstance(statement, config_parser.ImportStatement):
                module, problem = statement.module, "would run code"
                problems.append(Problem("import", module, problem, VALUES_ONLY))
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
    used, values, numbers = {"inf"}, dict[str, Any](), itertools.count(1)

    def expand(value: Any, path: str, outer: Sequence[str] = ()) -> Any:
        # Macros can grow exponentially.
        if next(numbers) > MAX_VALUES:
            problem = f"expands to more than {MAX_VALUES:,} values by macros"
            raise ConfigError(Problem(path, "...", problem, "write the values out"))
        if isinstance(value, dict):
            return {key: expand(item, path, outer) for key, item in value.items()}
        if isinstance(value, _Name):
            kind, name = value.text[0], value.text[1:]
            is_macro = kind == "%" and name in macros
            if is_macro and name not in outer:
                used.add(name)
                return expand(macros[name], path, (*outer, name))
            problem, remedy = "is not a macro", f"define it: {name} = ..."
            if is_macro:
                problem, remedy = "is a macro that reaches itself", "write a value"
            elif kind == "@":
                problem, remedy = "refers to code", VALUES_ONLY
            problems.append(Problem(path, value.text, problem, remedy))
        elif isinstance(value, list | tuple):
            return type(value)(expand(item, path, outer) for item in value)
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
