"""Programs of examples, which import what lies beside them by plain names."""

import contextlib
import importlib
import os
import subprocess
import sys

from tests.support.benchmarks import ROOT


@contextlib.contextmanager
def importing(*folders):
    """Yields a function that imports a program, and forgets all programs afterwards.

    Several examples have a program of one name, such as `train`.
    """
    names = {path.stem for folder in folders for path in folder.glob("*.py")}
    hidden = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    path = [*sys.path]
    sys.path[:0] = map(str, folders)
    try:
        yield importlib.import_module
    finally:
        sys.path[:] = path
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)


def run(path, *words, seconds):
    """Runs a program to a good end; returns what it prints."""
    result = subprocess.run(
        [sys.executable, str(path), *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
