"""The site holds all pages and all public names."""

import pathlib
import re
import subprocess
import sys

import pytest
import yaml

import zjax
import zjax_kernels

ROOT = pathlib.Path(__file__).parents[2]
REFERENCE = re.compile(r"^::: (\S+)$", re.M)
ELSEWHERE = {"linen", "nnx", "Config"}
"""Two modules, whose classes are shown, and what `zjax.settings.schema` holds."""


def pages_of(nav):
    """Every page of the tree of headings."""
    for entry in nav:
        (value,) = entry.values()
        yield from pages_of(value) if isinstance(value, list) else [value]


def test_the_navigation_lists_every_page_once():
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = list(pages_of(settings["nav"]))
    folders = [ROOT / "docs", ROOT / "examples"]
    found = [*ROOT.glob("*.md"), *(p for x in folders for p in x.rglob("*.md"))]
    assert sorted(listed) == sorted(str(page.relative_to(ROOT)) for page in found)


@pytest.mark.parametrize("package", [zjax, zjax_kernels])
def test_the_reference_shows_every_public_name(package):
    """Fails if a name is missing, or is shown twice."""
    pages = (ROOT / "docs" / "reference").glob("*.md")
    shown = [name for page in pages for name in REFERENCE.findall(page.read_text())]
    assert len(shown) == len(set(shown))
    own = {name.rpartition(".")[2] for name in shown if home_of(name) is package}
    assert own >= set(package.__all__) - ELSEWHERE


def home_of(name):
    """The package whose public name it is."""
    return zjax_kernels if name.startswith("zjax_kernels.") else zjax


def test_the_site_builds_without_warnings(tmp_path):
    pytest.importorskip("mkdocs", reason="needs pip install -e '.[docs]'")
    (tmp_path / "build" / "docs").mkdir(parents=True)
    for name in sites_names():
        (tmp_path / "build" / "docs" / name).symlink_to(ROOT / name)
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "zjax_kernels").symlink_to(ROOT / "zjax_kernels")
    (tmp_path / "mkdocs.yml").write_text((ROOT / "mkdocs.yml").read_text())
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def sites_names():
    """What `make docs` links into the site."""
    (line,) = re.findall(r"^SITE := (.+)$", (ROOT / "Makefile").read_text(), re.M)
    return line.split()
