"""Optional packages, imported where they are used.

So `import zjax` is fast, and training a user's model needs none of them.
"""

import importlib.util

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


def check_installed(name: str) -> None:
    """Checks that a package is installed before it is imported.

    Args:
        name: A key of `NEEDED_FOR`.

    Raises:
        PackageError: It is not installed.

    Example:
        >>> check_installed("grain")
    """
    if importlib.util.find_spec(name) is None:
        problem = f"is not installed, and {NEEDED_FOR[name]} need it"
        remedy = f"pip install {_DISTRIBUTIONS.get(name, name)}"
        raise PackageError(Problem("package", name, problem, remedy))
