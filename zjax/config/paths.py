"""Paths as users write them: `~` is a home, and a URL is refused."""

import os
import re

from zjax.errors import ConfigError, Problem, ZjaxError

SETTINGS = ("directory", "zero.nvme_paths", "data.path", "checkpoint.init_from")
"""All settings that are paths."""
OPTIONAL = ("data.path", "checkpoint.init_from")
"""Those that may be empty, which says that there is none."""

_MOST_NAME, _MOST_PATH = 255, 4_000
_SCHEME = re.compile(r"\s*[A-Za-z](:/|[A-Za-z0-9+.-]+:)/")
"""With one slash, too, which is what `pathlib` leaves of two; `c:/` is none."""


def local_path(
    field: str,
    path: str | os.PathLike[str],
    error: type[ZjaxError] = ConfigError,
    *,
    is_made: bool = False,
) -> str:
    """Expands `~` and `~user`, and refuses what no file system has.

    Args:
        field: The setting or flag, for the problem.
        path: As the user gave it.
        error: What to raise.
        is_made: Whether the caller makes it, and says why it cannot be made.

    Returns:
        The path, as it can be opened.

    Raises:
        ZjaxError: Of the type `error`: an empty one, a URL, an unknown home, or what no
            path may hold.

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
    fault = _fault(given, is_made)
    if fault:
        raise error(Problem(field, given, fault, "give a path that can be opened"))
    expanded = os.path.expanduser(given)
    if expanded.startswith("~"):
        home, _, _ = given.partition("/")
        problem = f"begins with {home}, which names no home"
        remedy = "give the whole path, or begin it with ./"
        raise error(Problem(field, given, problem, remedy))
    return expanded


def _fault(path: str, is_made: bool) -> str:
    """Why no system call takes a path; empty where they do."""
    if "\0" in path:
        return "holds a NUL"
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        return "holds half a character (a lone surrogate)"
    longest = max(map(len, encoded.split(b"/")))
    is_long = longest > _MOST_NAME or len(encoded) > _MOST_PATH
    return "is too long" if is_long and not is_made else ""
