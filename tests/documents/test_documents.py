"""Documents: links lead somewhere, commands can be typed, programs run."""

import functools
import pathlib
import re
import shlex

import jax
import pytest
from contests.contest import load_contest

from tests.support.benchmarks import load
from zjax.cli.main import COMMANDS, command_name
from zjax.config import load_config
from zjax.config.shipped import find_config

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("docs", "examples")
PAGES = sorted(ROOT.glob("*.md")) + sorted(
    page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")
)
TASKS = sorted((ROOT / "docs").glob("*.md"))
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
PYTHON = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
ANCHOR = re.compile(r'<a id="(\w+)">')
HEADING = re.compile(r"^#+ (.+)$", re.M)
TYPED = re.compile(r"(?:^    |`)(zjax [^`\n]*--[^`\n]*)", re.M)
CONTEST = re.compile(r"(?:^    |`)(python \S+/contest\.py [^`\n]+)", re.M)
COMMON_FLAGS = ("config", "ds_config", "gin_file", "gin", "simulated_devices", "help")


def name_of(path):
    return str(path.relative_to(ROOT))


@functools.cache
def text_of(path):
    return path.read_text()


def anchors_of(path):
    """Headings as GitHub and MkDocs make anchors of them, and anchors in HTML."""
    text = FENCE.sub("", text_of(path))
    words = (
        re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(text)
    )
    return {word.strip().replace(" ", "-") for word in words} | {*ANCHOR.findall(text)}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    wrong = []
    for link in LINK.findall(CODE.sub("", text_of(page))):
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if "://" in link:
            continue
        if not path.exists() or (anchor and anchor not in anchors_of(path)):
            wrong.append(link)
    assert wrong == []


@pytest.mark.parametrize("page", [ROOT / "README.md", *TASKS], ids=name_of)
def test_programs_run(page, tmp_path, monkeypatch, untyped):
    """On eight devices, all blocks of a page one after another."""
    monkeypatch.chdir(tmp_path)
    assert jax.device_count() == 8
    names = {"__name__": "__main__"}
    blocks = tuple(PYTHON.finditer(text_of(page)))
    assert blocks
    for block in blocks:
        above = text_of(page)[: block.start(1)].count("\n") * "\n"
        exec(compile(above + block[1], str(page), "exec"), names)


def commands(typed=TYPED):
    """Commands with flags, of all pages: lines, and code within lines."""
    texts = (FENCE.sub("", text_of(page)) for page in PAGES)
    found = [line for text in texts for line in typed.findall(text)]
    return sorted({line for line in found if "..." not in line and "\\" not in line})


@pytest.mark.parametrize("line", commands())
def test_commands_can_be_typed(line):
    """Fails if a command, a flag, a file, a row or a setting of a document is none."""
    words = shlex.split(line, comments=True)[1:]
    if words[0] == "launch":
        words = words[2:]
    name = command_name(words)
    words = words[len(name.split()) :]
    assert name in COMMANDS
    given = [word.removeprefix("--").partition("=")[::2] for word in words]
    values = dict(given)
    for flag, value in given:
        assert flag in COMMANDS[name].flags or flag.partition(".")[0] in COMMON_FLAGS, (
            flag
        )
        if value and flag in ("config", "gin_file"):
            path = find_config(value) if flag == "config" else value
            assert (ROOT / path).is_file(), value
    settings = [f"{x}={y}".partition(".")[2] for x, y in given if "config." in x]
    source = ROOT / find_config(values["config"]) if "config" in values else {}
    load_config(source, *settings)


@pytest.mark.parametrize("line", commands(CONTEST))
def test_contests_can_be_typed(line):
    """Fails if a contest, a row or a contestant of a document is none."""
    words = shlex.split(line, comments=True)[2:]
    given = load("contest").make_parser().parse_args(words)
    rows, contestants = names_of(given.contest)
    assert {*given.rows} <= rows
    assert {*given.only} <= contestants


@functools.cache
def names_of(contest):
    """Rows and contestants of a contest."""
    found = load_contest(ROOT / contest)
    return {row.id for row in found.rows}, {each.name for each in found.contestants}


def test_readme_is_short():
    """Fails if the table becomes a wall of text again."""
    text = text_of(ROOT / "README.md")
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    cells = [cell for row in rows for cell in row.strip("| ").split(" | ")]
    assert len(rows) <= 12
    assert max(map(len, cells)) <= 120
    assert len(text.splitlines()) <= 150


def test_readme_leads_to_every_page():
    links = {
        link.partition("#")[0] for link in LINK.findall(text_of(ROOT / "README.md"))
    }
    assert {name_of(page) for page in TASKS} <= links
