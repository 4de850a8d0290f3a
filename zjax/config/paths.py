"""Checks paths as users write them: `~` is expanded, URLs are refused."""

import os
import re

from zjax.errors import ConfigError, Problem, ZjaxError

SETTINGS = (
    "directory",
    "zero.nvme_paths",
    "data.path",
    "checkpoint.init_from",
    "distill.teacher",
    "curriculum.metrics.index",
)
"""Settings that are paths; those of each entry of a tuple are named without its number.
"""
OPTIONAL = ("data.path", "checkpoint.init_from", "distill.teacher")
"""Settings among them that may be empty."""
CHECKED_LATER = ("curriculum.metrics.index",)
"""Settings among them whose checks name the file that is missing."""

_MAX_NAME, _MAX_PATH = 255, 4_000
_SCHEME = re.compile(r"\s*[A-Za-z](:/|[A-Za-z0-9+.-]+:)/")
"""Also with one slash, as `pathlib` drops the second; `c:/` does not match."""


def local_path(
    field: str,
    path: str | os.PathLike[str],
    error: type[ZjaxError] = ConfigError,
    *,
    creates: bool = False,
) -> str:
    """Expands `~` and `~user`, and refuses values that are not file-system paths.

    Args:
        field: Setting or flag, for the message.
        path: Path as the user wrote it.
        error: Type of the error.
        creates: Whether the caller creates the path, and reports if it is too long.

    Returns:
        The path, ready to be opened.

    Raises:
        ZjaxError: The path is empty, a URL, of an unknown home, or has invalid
            characters.

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
    if _SCHEME.match(given):
        problem = "is not a path of a file system"
        remedy = "give one on a disk, or where the bucket is mounted"
        raise error(Problem(field, given, problem, remedy))
    fault = _fault(given, creates)
    if fault:
        raise error(Problem(field, given, fault, "give a path that can be opened"))
    expanded = os.path.expanduser(given)
    if expanded.startswith("~"):
        home, _, _ = given.partition("/")
        problem = f"begins with {home}, which names no home"
        remedy = "give the whole path, or begin it with ./"
        raise error(Problem(field, given, problem, remedy))
    return expanded


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
