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


@each_config
def test_resolved_settings_are_known(path):
    """A changed default shows here; ZJAX_UPDATE_GOLDEN=1 accepts it."""
    text = zconfig.describe_config(zconfig.load_config(path))
    golden = GOLDEN / f"{path.stem}.txt"
    if os.environ.get("ZJAX_UPDATE_GOLDEN") == "1":
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()
