"""Each file in configs/: its Gin twin is equal, it can work, its text is known."""

import ast
import os
import pathlib

import pytest

from zjax import config as zconfig
from zjax.config import gin

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "configs"
CONFIGS = sorted((ROOT / "configs").glob("*.py"))
each_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)


def test_every_python_config_has_a_gin_twin():
    twins = sorted((ROOT / "configs").glob("*.gin"))
    assert [path.stem for path in CONFIGS] == [path.stem for path in twins]
    assert CONFIGS


@each_config
def test_gin_twin_is_equal(path):
    assert zconfig.load_config(path.with_suffix(".gin")) == zconfig.load_config(path)


@each_config
def test_config_can_work(path):
    zconfig.check_config(zconfig.load_config(path), num_devices=8)


@each_config
def test_docstring_says_how_to_run_it(path):
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    starts = [line.split()[0] for line in text.splitlines() if line.strip()]
    asked = [start for start in starts if start in ("Run:", "Needs:", "Expect:")]
    assert asked == ["Run:", "Needs:", "Expect:"]
    assert f"configs/{path.name}" in text


@each_config
def test_a_described_config_can_work(path):
    """Fails if a derived value would be refused once it is written in a file."""
    text = zconfig.describe_config(zconfig.load_config(path))
    described = gin.from_gin(bindings=text.splitlines())
    zconfig.check_config(described, num_devices=8)


def settings_of(text):
    """Settings of a described config by name."""
    return dict(line.split(" = ", 1) for line in text.splitlines())


def changes_of(text, defaults):
    """Lines of the settings that differ from defaults; `-` where one is not printed."""
    settings = {name: "-" for name in settings_of(defaults)} | settings_of(text)
    lines = dict.fromkeys(defaults.splitlines())
    return [
        line
        for name, value in settings.items()
        if (line := f"{name} = {value}") not in lines
    ]


def golden_of(lines, stem):
    """Lines of a golden file, which ZJAX_UPDATE_GOLDEN=1 replaces by given ones."""
    golden = GOLDEN / f"{stem}.txt"
    if os.environ.get("ZJAX_UPDATE_GOLDEN") == "1":
        golden.write_text("".join(f"{line}\n" for line in lines))
    return golden.read_text().splitlines()


def test_default_settings_are_known():
    lines = zconfig.describe_config(zconfig.Config()).splitlines()
    assert lines == golden_of(lines, "defaults")


@each_config
def test_resolved_settings_are_known(path):
    """A changed default of zjax shows in one file, a changed config in its own."""
    text = zconfig.describe_config(zconfig.load_config(path))
    defaults = zconfig.describe_config(zconfig.Config())
    changes = changes_of(text, defaults)
    assert changes == golden_of(changes, path.stem)
