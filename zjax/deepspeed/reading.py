"""Reads a ds_config.json as DeepSpeed does: HJSON, and no key twice."""

import collections
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import hjson

from zjax import files
from zjax.errors import ConfigError, Problem, find_fault

MISSING = object()
"""Stands for a value that a type cannot take."""


def read_file(path: pathlib.Path) -> dict[str, Any]:
    """Reads keys and values of a JSON file, also with comments and trailing commas."""
    if fault := find_fault(path):
        raise _error(path, fault)
    try:
        text = files.read_text(path)
    except OSError as error:
        raise _error(path, f"cannot be read ({error.strerror})") from error
    except ValueError as error:
        remedy = "give a ds_config.json, saved as UTF-8"
        raise _error(path, f"cannot be read ({error})", remedy) from error
    # Editors may write a byte order mark.
    return read_text(text.removeprefix("\ufeff"), str(path))


def read_text(text: str, name: str = "ds_config") -> dict[str, Any]:
    """Parses the text of an HJSON object; errors name the text."""
    twice = list[str]()

    def to_dict(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        counts = collections.Counter(key for key, _ in pairs)
        twice.extend(key for key, count in counts.items() if count > 1)
        return dict(pairs)

    # HJSON would take text without braces for an object.
    if not text.lstrip().startswith(("{", "#", "//", "/*")):
        raise _error(name, "does not begin with '{'", "keep the object alone")
    try:
        values = hjson.loads(text, object_pairs_hook=to_dict)
    except RecursionError as error:
        raise _error(name, "is nested too deep", "give a ds_config.json") from error
    except hjson.HjsonDecodeError as error:
        if found := _find_bare_word(text):
            number, word = found
            problem = f"is not JSON on line {number} ({word} is no value)"
            remedy = f"write {_WORDS.get(word, 'it in quotes')}"
            raise _error(name, problem, remedy) from error
        where = getattr(error, "lineno", None)
        place = f" on line {where}" if where else ""
        problem = f"is not JSON{place} ({str(error).partition(':')[0]})"
        raise _error(name, problem, "correct it there") from error
    except IndexError as error:  # HJSON looks for the line before '''
        problem = "is not JSON on line 1 (''' begins no text there)"
        raise _error(name, problem, "write the text in double quotes") from error
    except (OverflowError, ValueError) as error:  # HJSON calls `int` and `float`
        problem = f"holds a number that is too large ({error})"
        raise _error(name, problem, "write another one") from error
    if twice:
        keys = ", ".join(twice)
        raise _error(name, f"has more than one {keys}", "keep one of them")
    if not isinstance(values, dict):
        raise _error(name, f"holds a {type(values).__name__}", "give an object")
    return values


def _find_bare_word(text: str) -> tuple[int, str] | None:
    """First word without quotes before a comma or bracket, and the number of the line.

    HJSON reads such a word as a text up to the end of the line, and complains at the
    end of the file.
    """
    for number, line in enumerate(text.splitlines(), 1):
        plain = re.sub(r'"[^"]*"', '""', line)
        if word := _BARE.search(re.sub(r"(#|//).*", "", plain)):
            return number, word[1]
    return None


_BARE = re.compile(r"[:\[]\s*(?!(?:true|false|null)\b)([A-Za-z_$][^\s,\]}]*)\s*[,\]}]")
_WORDS = {"True": "true", "False": "false", "None": "null"}


def leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted path; an empty section is a value."""
    found = dict[str, Any]()
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            found |= leaves(value, f"{path}.")
        else:
            found[path] = value
    return found


def coerce(value: Any, kind: type) -> Any:
    """Coerces a value to a type as DeepSpeed does; `MISSING` if that is impossible."""
    if kind is bool:
        words = {"true": True, "false": False, "1": True, "0": False}
        return words.get(str(value).lower(), MISSING)
    if isinstance(value, bool):  # a bool is an int to Python
        return MISSING
    if kind in (int, float) and isinstance(value, int | float | str):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            return MISSING
        if kind is float:
            return number
        return int(number) if number.is_integer() else MISSING
    return value if isinstance(value, kind) else MISSING


def _error(name: object, problem: str, remedy: str = "give a readable file"):
    return ConfigError(Problem("ds_config", str(name), problem, remedy))
