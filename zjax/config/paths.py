"""Checks paths as users write them: `~` and `$VAR` are expanded, URLs refused."""

import os
import re

from zjax.errors import ConfigError, Problem, ZjaxError

SETTINGS = (
    "directory",
    "zero.nvme_paths",
    "data.path",
    "checkpoint.init_from",
    "lora.init_from",
    "distill.teacher",
    "curriculum.metrics.index",
)
"""Settings that are paths; those of each entry of a tuple are named without its number.
"""
OPTIONAL = (
    *("data.path", "checkpoint.init_from", "lora.init_from"),
    "distill.teacher",
)
"""Settings among them that may be empty."""
CHECKED_LATER = ("curriculum.metrics.index",)
"""Settings among them whose checks name the file that is missing."""

_MAX_NAME, _MAX_PATH = 255, 4_000
_SCHEME = re.compile(r"\s*[A-Za-z](:/|[A-Za-z0-9+.-]+:)/")
"""Also with one slash, as `pathlib` drops the second; `c:/` does not match."""
_VARIABLE = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([^}]*)\})")


def local_path(
    field: str,
    path: str | os.PathLike[str],
    error: type[ZjaxError] = ConfigError,
    *,
    creates: bool = False,
) -> str:
    """Expands `~`, `~user`, `$VAR` and `${VAR}`, and refuses what is no path of a disk.

    Args:
        field: Setting or flag, for the message.
        path: Path as the user wrote it.
        error: Type of the error.
        creates: Whether the caller creates the path, and reports if it is too long.

    Returns:
        The path, ready to be opened.

    Raises:
        ZjaxError: The path is empty, a URL, of an unknown home or variable, or has
            invalid characters.

    Example:
        >>> local_path("directory", "runs/a")
        'runs/a'
        >>> local_path("directory", "gs://bucket/a")
        Traceback (most recent call last):
        zjax.errors.ConfigError: directory='gs://bucket/a' is not a path of a file \
system; give one on a disk, or where the bucket is mounted
    """
    given = os.fspath(path)
    if not given:
        raise error(Problem(field, "", "is empty", "give a path; . is this directory"))
    if problems := _variable_problems(field, given):
        raise error(*problems)
    path = _VARIABLE.sub(lambda found: os.environ[found[1] or found[2]], given)
    if _SCHEME.match(path):
        problem = "is not a path of a file system"
        remedy = "give one on a disk, or where the bucket is mounted"
        raise error(Problem(field, given, problem, remedy))
    fault = _fault(path, creates)
    if fault:
        raise error(Problem(field, given, fault, "give a path that can be opened"))
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        home, _, _ = path.partition("/")
        problem = f"begins with {home}, which names no home"
        remedy = "give the whole path, or begin it with ./"
        raise error(Problem(field, given, problem, remedy))
    return expanded


def _variable_problems(field: str, path: str) -> list[Problem]:
    """Refuses variables that are unset or empty, or whose values name others."""
    problems = []
    for found in _VARIABLE.finditer(path):
        name = found[1] or found[2]
        value = os.environ.get(name)
        if not value:
            problem = (
                f"needs ${name}, which is {'not set' if value is None else 'empty'}"
            )
            problems.append(Problem(field, path, problem, "set it, or write the path"))
        elif _VARIABLE.search(value):
            problem = f"needs ${name}, whose value {value!r} names another variable"
            problems.append(Problem(field, path, problem, "write the path in it"))
    return problems


def _fault(path: str, creates: bool) -> str:
    """Why the operating system refuses a path; empty if it does not."""
    if "\0" in path:
        return "holds a NUL"
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        return "holds half a character (a lone surrogate)"
    longest = max(map(len, encoded.split(b"/")))
    is_long = longest > _MAX_NAME or len(encoded) > _MAX_PATH
    return "is too long" if is_long and not creates else ""
