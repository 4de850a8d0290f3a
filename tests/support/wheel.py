"""The wheel of zjax, and an environment that has all it needs, but not zjax."""

import pathlib
import site
import subprocess
import sys
import venv

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def build(folder):
    """Builds the wheel into a folder."""
    pytest.importorskip("hatchling", reason="needs pip install -e '.[test]'")
    pytest.importorskip("hatch_fancy_pypi_readme", reason="needs the test extra")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    subprocess.run([*command, "-d", folder], cwd=ROOT, check=True)
    (path,) = folder.glob("*.whl")
    return path


def make_environment(folder):
    """Makes a virtual environment that sees the packages of this one; its Python.

    Packages installed in development mode are not seen.
    """
    venv.create(folder)
    python = folder / "bin" / "python"
    show = "import site; print(site.getsitepackages()[0])"
    found = subprocess.run([python, "-c", show], capture_output=True, check=True)
    own = pathlib.Path(found.stdout.decode().strip())
    (own / "packages.pth").write_text("\n".join(site.getsitepackages()))
    return python
