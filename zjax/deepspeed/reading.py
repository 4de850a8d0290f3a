"""Reads a ds_config.json as DeepSpeed does: HJSON, and no key twice."""

import collections
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import hjson

from zjax.errors import ConfigError, Problem, find_fault

MAX_BYTES = 1 << 20
"""Largest size of a file; configurations are smaller."""
DEEP = "has sections in sections, too many to follow"
MAX_KEYS = 1_000
"""Largest number of keys: each unknown key is compared with all known names."""


def read_file(path: pathlib.Path) -> dict[str, Any]:
    """Reads keys and values of a JSON file, also with comments and trailing commas."""
    if fault := find_fault(path):
        raise _error(path, fault)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        # Editors may write a byte order mark.
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise _error(path, f"cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise _error(path, "is not UTF-8 text", "save it as UTF-8") from error
    if len(data) > MAX_BYTES:
        raise _error(path, f"is above {MAX_BYTES:,} bytes", "give a ds_config.json")
    return read_text(text, str(path))


def read_text(text: str, name: str = "ds_config") -> dict[str, Any]:
    r"""Parses HJSON text whose outermost value is an object.

    `name` stands for the text in errors.

    Example:
        >>> read_text('{"zero_optimization": {"stage": 2,}, # sharded \n}')
        {'zero_optimization': {'stage': 2}}
    """
    twice, num_keys = list[str](), 0

    def to_dict(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal num_keys
        num_keys += len(pairs)
        counts = collections.Counter(key for key, _ in pairs)
        twice.extend(key for key, count in counts.items() if count > 1)
        return dict(pairs)

    # HJSON would take text without braces for an object.
    if not text.lstrip().startswith(("{", "#", "//", "/*")):
        raise _error(name, "does not begin with '{'", "keep the object alone")
    try:
        values = hjson.loads(text, object_pairs_hook=to_dict)
    except RecursionError as error:
        raise _error(name, DEEP, "give a ds_config.json") from error
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
    except (OverflowError, ValueError) as error:  # HJSON calls `int` and `float`
        problem = f"holds a number that is too large ({error})"
        raise _error(name, problem, "write another one") from error
    if num_keys > MAX_KEYS:
        raise _error(name, f"has {num_keys:,} keys", f"keep at most {MAX_KEYS:,}")
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
    """Values by dotted path; an empty section is a value.

    Example:
        >>> leaves({"zero_optimization": {"stage": 2}, "fp16": {}})
        {'zero_optimization.stage': 2, 'fp16': {}}
    """
    found = dict[str, Any]()
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            found |= leaves(value, f"{path}.")
        else:
            found[path] = value
    return found


def _error(name: object, problem: str, remedy: str = "give a readable file"):
    return ConfigError(Problem("ds_config", str(name), problem, remedy))
