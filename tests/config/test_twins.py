"""Each file in configs/: its Gin twin is equal, it can work, its text is known."""

import ast
import os
import pathlib
import re
import tomllib

import pytest

from zjax import config as zconfig
from zjax.config import gin
from zjax.settings.describe import describe_settings

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


def settings_of(config):
    """Values of the settings that a run prints, by name."""
    lines = zconfig.describe_config(config).splitlines()
    return dict(line.split(" = ", 1) for line in lines)


def default_settings():
    """Defaults of all settings by name: values of a plain run, or of the schema."""
    lines = describe_settings().splitlines()
    listed = [line.strip() for line in lines if re.match(r"  \S", line)]
    return dict(f"config.{line}".split(" = ", 1) for line in listed) | PLAIN


def golden_of(lines, stem):
    """Lines of a golden file, which ZJAX_UPDATE_GOLDEN=1 replaces by given ones."""
    golden = GOLDEN / f"{stem}.txt"
    if os.environ.get("ZJAX_UPDATE_GOLDEN") == "1":
        golden.write_text("".join(f"{line}\n" for line in lines))
    return golden.read_text().splitlines()


PLAIN = settings_of(zconfig.Config())
DEFAULTS = default_settings()


def test_released_defaults_stay():
    """A setting and a default that users rely on may not change unseen.

    Settings are added at the next release. A plain run prints lines without `#`.
    """
    lines = {x: "# " * (x not in PLAIN) + f"{x} = {DEFAULTS[x]}" for x in DEFAULTS}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    release = f"# zjax {project['version']}"
    golden, *released = golden_of([release, *lines.values()], "defaults")
    assert golden == release, "ZJAX_UPDATE_GOLDEN=1 adds the settings of this release"
    names = [line.removeprefix("# ").partition(" = ")[0] for line in released]
    assert [lines.get(name) for name in names] == released


@each_config
def test_resolved_settings_are_known(path):
    """Settings that differ from defaults; `-` where a plain run alone prints one."""
    settings = dict.fromkeys(PLAIN, "-") | settings_of(zconfig.load_config(path))
    lines = [f"{x} = {settings[x]}" for x in settings if settings[x] != DEFAULTS[x]]
    assert lines == golden_of(lines, path.stem)
