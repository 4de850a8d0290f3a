"""What contributors and GitHub read agrees with the Makefile and pyproject.toml."""

import pathlib
import re
import tomllib

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
GITHUB = ROOT / ".github"
TARGETS = {"lint", "test", "docs", "wheel"}
REPOSITORY = re.compile(r"https://github\.com/[\w-]+/zjax\b")


def jobs():
    return yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())["jobs"]


def steps_of(job, key):
    return [step[key] for step in job["steps"] if key in step]


def test_the_workflow_runs_what_contributors_run():
    """Fails if a target is left out, or a step repeats what the Makefile says."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    made = re.findall(r"^    make (\w+)", page, re.M)
    check, wheel = jobs()["check"], jobs()["wheel"]
    targets = {*check["strategy"]["matrix"]["target"], "wheel"}
    assert targets == TARGETS == {*made}
    assert steps_of(check, "run") == ["make ${{ matrix.target }}"]
    assert steps_of(wheel, "run")[0] == "make wheel"
    makefile = (ROOT / "Makefile").read_text()
    assert {*re.findall(r"^(\w+):", makefile, re.M)} >= TARGETS


def test_the_workflow_has_the_oldest_python():
    oldest = PYPROJECT["project"]["requires-python"].removeprefix(">=")
    found = [
        step["python-version"]
        for job in jobs().values()
        for step in steps_of(job, "with")
        if "python-version" in step
    ]
    assert found == [oldest] * 2


def test_the_workflow_may_only_read():
    text = (GITHUB / "workflows" / "ci.yml").read_text()
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    assert "secrets." not in text
    used = [use for job in jobs().values() for use in steps_of(job, "uses")]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", use) for use in used)


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_issue_forms_are_whole(name):
    """Fails if GitHub would refuse the form."""
    form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    assert {"name", "description", "body"} <= {*form}
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len({*ids})
    assert all(field["attributes"]["label"] for field in form["body"])
    assert any(field.get("validations", {}).get("required") for field in form["body"])


def test_every_page_names_the_same_repository():
    pages = [*ROOT.glob("*.md"), *GITHUB.rglob("*.*"), ROOT / "pyproject.toml"]
    found = {url for page in pages for url in REPOSITORY.findall(page.read_text())}
    assert found == {PYPROJECT["project"]["urls"]["Repository"]}
