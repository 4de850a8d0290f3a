"""The versions of what a run is made of."""

import hashlib
import importlib.metadata
import importlib.util
import pathlib
import platform

PACKAGES = ("zjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
_OWN = ("zjax", "zjax_kernels")


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that a run stands on.

    Returns:
        Versions by name; a package that is not installed has none.

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
    """A digest of zjax's own files, which people change without a new version.

    Returns:
        16 hexadecimal digits over the names and contents of all Python files.
    """
    digest = hashlib.sha256()
    for name in _OWN:
        spec = importlib.util.find_spec(name)
        for folder in (spec and spec.submodule_search_locations) or ():
            for path in sorted(pathlib.Path(folder).rglob("*.py")):
                digest.update(str(path.relative_to(folder)).encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
