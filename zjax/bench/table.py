"""BENCHMARKS.md and a page per theme, rebuilt from the files of all results."""

import html
import itertools
import os
import pathlib
import re
from collections.abc import Mapping

from zjax.bench.cells import (
    COLUMNS,
    NUMBERS,
    comparison_line,
    describe_side,
    heading_line,
    table_head,
)
from zjax.bench.result import Comparison, Result, read_result
from zjax.bench.summary import describe_results
from zjax.bench.themes import THEMES
from zjax.errors import BenchError, Problem

BEGIN = "<!-- results: written by `zjax bench --contest`, from the files it names -->"
END = "<!-- end of results -->"
PAGES = pathlib.Path("docs", "benchmarks")
"""Folder of the theme pages, relative to the summary."""


def update_table(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Rewrites the summary of all results and the page of each theme.

    Only the text between the lines `BEGIN` and `END` is rewritten. A missing page of a
    theme with results is created in `docs/benchmarks/`, beside the summary.

    Args:
        path: The summary, a Markdown file with the two lines.
        folder: Folder of the results, `*.json`.

    Raises:
        BenchError: A file lacks the two lines, or a result has mistakes.
    """
    path, folder = pathlib.Path(path), pathlib.Path(folder)
    files = sorted(folder.glob("*.json"), key=lambda file: _order(file.stem))
    results = {file: read_result(file) for file in files}
    pages = {theme: path.parent / PAGES / f"{theme}.md" for theme in THEMES}
    links = {theme: (PAGES / f"{theme}.md").as_posix() for theme in THEMES}
    _replace(path, describe_results(list(results.values()), links))
    for theme, page in pages.items():
        link = pathlib.Path(os.path.relpath(folder, page.parent))
        chosen = {
            (link / file.name).as_posix(): result
            for file, result in results.items()
            if result.theme == theme
        }
        if not page.exists():
            if not chosen:
                continue
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(f"# {THEMES[theme]}: all results\n\n{BEGIN}\n{END}\n")
        _replace(page, theme_text(chosen))


def theme_text(results: Mapping[str, Result]) -> str:
    """Tabulates results in one line per comparison, with a fold of details for each.

    Args:
        results: Results by the link to their file.

    Returns:
        Markdown: the table, then per result a `<details>` element with ranges, bar,
        device, notes and command. Claims in the table link to their details.
    """
    lines = table_head(COLUMNS, NUMBERS)
    for result in results.values():
        lines += table_rows(result)
    folds = [describe_details(result, link) for link, result in results.items()]
    return "\n\n".join(["\n".join(lines), "## Ranges, notes and commands", *folds])


def _replace(path: pathlib.Path, text: str) -> None:
    """Replaces the text between the two lines of a file.

    The site lays the `div` out in full width (docs/site.css); GitHub ignores its class.
    """
    content = path.read_text() if path.is_file() else ""
    before, begin, rest = content.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        problem = "has no place for the results"
        remedy = f"write a file with the lines {BEGIN} and {END}"
        raise BenchError(Problem("table", str(path), problem, remedy))
    text = f'<div class="results" markdown>\n\n{text}\n\n</div>'
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def table_rows(result: Result) -> list[str]:
    """Markdown lines of one result: one per comparison, below the claim if several."""
    claim = f"[{_title(result)}](#{result.id})"
    if len(result.cases) == 1:
        return [comparison_line(claim, result, result.cases[0])]
    names = (f"&emsp;{case.name}" for case in result.cases)  # indented
    lines = map(comparison_line, names, itertools.repeat(result), result.cases)
    return [heading_line(claim), *lines]


def _title(result: Result) -> str:
    """Names the claim, with the number of devices where each number has a result."""
    _, devices = _order(result.id)
    return result.claim.rstrip(".") + (f" ({devices} devices)" if devices else "")


def describe_details(result: Result, link: str) -> str:
    """Folds what the table leaves out of one result; GitHub and the site unfold it.

    Args:
        result: The result.
        link: Link to its file.

    Returns:
        A `<details>` element with Markdown inside. Its anchor is inside, because
        browsers open a fold only for a link to something in it.
    """
    lines = [
        f"<details markdown>\n<summary>{html.escape(_title(result))}</summary>\n",
        f'<a id="{result.id}"></a>\n',
    ]
    for case in result.cases:
        name = f"{case.name}: " if case.name else ""
        sides = f"{describe_side(case.ours)}; {describe_side(case.peer)}"
        bar = _bar(case, result.higher_is_better)
        lines.append(f"- {name}{sides}" + (f"; bar: {bar}" if bar else ""))
    lines.append(f"- Measured on {result.device}, {result.date}.")
    if result.outdated:
        lines.append(f"- **Older revision**: {result.outdated}.")
    if result.notes:
        lines.append(f"- Notes: {result.notes}.")
    lines.append(f"- `{result.command}` ([its file]({link}))")
    return "\n".join([*lines, "\n</details>"])


def _bar(case: Comparison, higher_is_better: bool) -> str:
    """The ratio that a case must reach, and the one it aims at."""
    bound = "at least" if higher_is_better else "at most"
    bars = {bound: case.must, "aim": case.aim}
    return ", ".join(f"{name} {x:g}" for name, x in bars.items() if x is not None)


def _order(name: str) -> tuple[str, int]:
    """Splits an id into the name of its row and a number of devices, 0 without one."""
    found = re.fullmatch(r"(.+)_x(\d+)", name)
    return (found[1], int(found[2])) if found else (name, 0)
