"""Optional packages, imported where they are used.

So `import zjax` is fast, and training a user's model needs none of them.
"""

import importlib.metadata
import importlib.util
import re

from zjax.errors import PackageError, Problem

NEEDED_FOR = {
    "grain": "batches of a loader",
    "jinja2": "chat templates",
    "lm_eval": "tasks of the evaluation harness",
    "matplotlib": "pictures",
    "orbax": "checkpoints",
    "pyarrow": "Parquet and Arrow files",
    "qwix": "matrices of int8 and int4",
    "safetensors": "safetensors files",
    "tensorboardX": "event files of TensorBoard",
    "tokenizers": "vocabularies of byte pairs",
}
"""Features by package."""
_DISTRIBUTIONS = {"orbax": "orbax-checkpoint"}
"""Names to install, if not the import name."""
OLDEST = {"jinja2": "3.1.6"}
"""Oldest versions that are safe: templates break out of the sandboxes of older ones."""


def check_installed(name: str) -> None:
    """Checks that a package is installed before it is imported.

    Args:
        name: A key of `NEEDED_FOR`.

    Raises:
        PackageError: It is not installed, or older than `OLDEST`.

    Example:
        >>> check_installed("grain")
    """
    install = _DISTRIBUTIONS.get(name, name)
    if importlib.util.find_spec(name) is None:
        problem = f"is not installed, and {NEEDED_FOR[name]} need it"
        raise PackageError(Problem("package", name, problem, f"pip install {install}"))
    if name in OLDEST:
        found = importlib.metadata.version(install)
        if _release(found) < _release(OLDEST[name]):
            problem = f"is {found}, and {NEEDED_FOR[name]} need {OLDEST[name]} or later"
            remedy = f"pip install '{install}>={OLDEST[name]}'"
            raise PackageError(Problem("package", name, problem, remedy))


def _release(version: str) -> list[int]:
    """Parses the numbers of a version, without what marks a pre-release.

    Example:
        >>> _release("3.1.6rc1")
        [3, 1, 6]
    """
    return [int(number) for number in re.findall(r"(?:^|\.)([0-9]+)", version)]
