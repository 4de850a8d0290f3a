"""Who installs a wheel has what a clone has: named configs, types, links that lead."""

import email
import json
import pathlib
import re
import tomllib
import zipfile

import pytest

from tests.support import wheel as wheels
from zjax.config import load_config, shipped
from zjax.errors import ConfigError

ROOT = pathlib.Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINK = re.compile(r"\]\(([^)\s]+)\)")
MAX_BYTES = 10 * 2**20


def test_metadata_says_where_zjax_is_from():
    project = PYPROJECT["project"]
    repository = project["urls"]["Repository"]
    assert all(url.startswith(repository) for url in project["urls"].values())
    assert {*project["urls"]} >= {"Documentation", "Changelog", "Issues"}
    assert project["license"] == "Apache-2.0"
    assert "Typing :: Typed" in project["classifiers"]
    assert not [x for x in project["classifiers"] if x.startswith("License ::")]
    for package in ("zjax", "zjax_kernels"):
        assert (ROOT / package / "py.typed").is_file()


def test_the_page_of_the_package_has_absolute_links():
    """Fails if a link of the README leads nowhere without the repository around it."""
    hook = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = before = (ROOT / "README.md").read_text()
    for change in hook["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    assert_absolute(text)
    base = PYPROJECT["project"]["urls"]["Repository"]
    shown = {re.sub(f"^{base}/(raw|blob)/main/", "", x) for x in LINK.findall(text)}
    assert shown == {*LINK.findall(before)}
    assert f"]({base}/raw/main/examples/quickstart/training.png)" in text


def assert_absolute(text):
    links = LINK.findall(text)
    assert links
    assert [x for x in links if not x.startswith(("https://", "#"))] == []


def test_the_image_is_in_step_with_the_package():
    """Fails if the image has a Python, a CUDA or a program that zjax does not have."""
    text = (ROOT / "Dockerfile").read_text()
    project = PYPROJECT["project"]
    (python,) = re.findall(r"^FROM python:([\d.]+)-slim$", text, re.M)
    assert f"Programming Language :: Python :: {python}" in project["classifiers"]
    (extra,) = re.findall(r"^RUN pip install --no-cache-dir '\.\[(\w+)\]'$", text, re.M)
    assert project["optional-dependencies"][extra] == [f"jax[{extra}]"]
    notebook = (ROOT / "examples" / "notebooks" / "install.py").read_text()
    assert f'"[{extra}]"' in notebook
    (entry,) = re.findall(r"^ENTRYPOINT (.+)$", text, re.M)
    assert json.loads(entry)[0] in project["scripts"]  # a shell would keep signals
    (config,) = re.findall(r"--config=(\w+)$", text, re.M)
    assert shipped.find_config(config).is_file()


def test_the_image_is_built_from_all_that_the_package_needs():
    """Fails if a file is missing where the image is built, or `.git` goes there."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if not line.startswith("#")]
    sent = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    hatch = PYPROJECT["tool"]["hatch"]
    readme = hatch["metadata"]["hooks"]["fancy-pypi-readme"]["fragments"]
    needed = {"pyproject.toml", *PYPROJECT["project"]["license-files"]}
    needed |= {*hatch["build"]["targets"]["wheel"]["only-include"]}
    needed |= {fragment["path"] for fragment in readme}
    assert rules[0] == "*"
    assert sent == needed
    assert all((ROOT / name).exists() for name in sent)


@pytest.mark.parametrize("folder", ["configs", "zjax/configs"])
def test_a_name_is_a_config_of_a_clone_or_of_a_wheel(folder, tmp_path, monkeypatch):
    """Fails if a wheel is looked through where only a clone has configs."""
    path = tmp_path / folder / "small.py"
    path.parent.mkdir(parents=True)
    path.write_text("def get_config(): return {'num_steps': 7}")
    folders = (tmp_path / "zjax" / "configs", tmp_path / "configs")
    monkeypatch.setattr(shipped, "_FOLDERS", folders)
    assert load_config("small").num_steps == 7


def test_a_file_without_a_suffix_is_not_a_name(tmp_path):
    with pytest.raises(ConfigError, match="is not a config file"):
        load_config(tmp_path / "quickstart")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("quickstat", "did you mean quickstart?"),
        ("another", "give the path of a .py or .gin file"),
    ],
)
def test_an_unknown_name_is_refused(name, remedy):
    with pytest.raises(ConfigError) as error:
        load_config(name)
    assert str(error.value) == (
        f"config={name!r} is not the name of a config of zjax; {remedy}"
    )


@pytest.mark.slow
def test_the_wheel_holds_all_that_runs_need(tmp_path):
    """Fails if a wheel lacks a module, a config or its types, or has more than that."""
    path = wheels.build(tmp_path)
    assert path.stat().st_size < MAX_BYTES
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        (metadata,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        described = email.message_from_bytes(wheel.read(metadata))
        quickstart = wheel.read("zjax/configs/quickstart.py")
    packages = [ROOT / name for name in ("zjax", "zjax_kernels")]
    modules = {
        str(path.relative_to(ROOT))
        for package in packages
        for path in (*package.rglob("*.py"), package / "py.typed")
    }
    configs = {f"zjax/configs/{path.name}" for path in (ROOT / "configs").glob("*.py")}
    assert {x for x in names if x.endswith((".py", "py.typed"))} == modules | configs
    assert not [x for x in names if x.endswith((".pyc", ".gin"))]
    assert quickstart == (ROOT / "configs" / "quickstart.py").read_bytes()
    assert described["License-Expression"] == "Apache-2.0"
    assert described["Description-Content-Type"] == "text/markdown"
    assert_absolute(described.get_payload())
