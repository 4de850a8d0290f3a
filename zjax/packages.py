"""Packages that a part of zjax needs: imported where that part is used.

So `import zjax` is quick, and a step on a model of yours needs none of them.
"""

import importlib.util

from zjax.errors import PackageError, Problem

NEEDED_FOR = {
    "grain": "batches of a loader",
    "matplotlib": "pictures",
    "orbax": "checkpoints",
    "pyarrow": "Parquet files",
    "safetensors": "safetensors files",
    "tensorboardX": "event files of TensorBoard",
    "tokenizers": "vocabularies of byte pairs",
}
"""What each of them is for."""
_DISTRIBUTIONS = {"orbax": "orbax-checkpoint"}
"""What to install, where it is not called as what is imported."""


def check_installed(name: str) -> None:
    """Finds out that a package is missing before it is imported.

    Args:
        name: One of `NEEDED_FOR`.

    Raises:
        PackageError: It is not installed.

    Example:
        >>> check_installed("grain")
    """
    if importlib.util.find_spec(name) is None:
        problem = f"is not installed, and {NEEDED_FOR[name]} need it"
        remedy = f"pip install {_DISTRIBUTIONS.get(name, name)}"
        raise PackageError(Problem("package", name, problem, remedy))
