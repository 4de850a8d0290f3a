"""Versions of the software of a run."""

import hashlib
import importlib.metadata
import importlib.util
import pathlib
import platform

PACKAGES = ("zjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
_SOURCES = ("zjax", "zjax_kernels")


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages in `PACKAGES`, by name.

    Example:
        >>> list(versions())[:1]
        ['python']
    """
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def source_digest() -> str:
    """A digest of the source files of zjax, which may change without a new version.

    Returns:
        16 hexadecimal digits over names and contents of all Python files.
    """
    digest = hashlib.sha256()
    for name in _SOURCES:
        spec = importlib.util.find_spec(name)
        for folder in (spec and spec.submodule_search_locations) or ():
            for path in sorted(pathlib.Path(folder).rglob("*.py")):
                digest.update(str(path.relative_to(folder)).encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
