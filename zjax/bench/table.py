"""BENCHMARKS.md and a page per theme, rebuilt from the files of all results."""

import os
import pathlib
import re

from zjax.bench.cells import describe_side, table_head, table_line
from zjax.bench.result import Comparison, Result, read_result, verdict
from zjax.bench.summary import describe_results
from zjax.bench.themes import THEMES
from zjax.errors import BenchError, Problem

BEGIN = "<!-- results: written by `zjax bench --contest`, from the files it names -->"
END = "<!-- end of results -->"
PAGES = pathlib.Path("docs", "benchmarks")
"""Folder of the theme pages, relative to the summary."""
_COLUMNS = (
    "row",
    "claim",
    "ours",
    "peer",
    "ours / peer",
    "bar",
    "verdict",
    "where",
    "notes",
    "command",
)


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
    files = sorted(folder.glob("*.json"), key=_order)
    results = {file: read_result(file) for file in files}
    pages = {theme: path.parent / PAGES / f"{theme}.md" for theme in THEMES}
    links = {theme: (PAGES / f"{theme}.md").as_posix() for theme in THEMES}
    _replace(path, describe_results(list(results.values()), links))
    for theme, page in pages.items():
        lines = table_head(_COLUMNS)
        link = pathlib.Path(os.path.relpath(folder, page.parent))
        for file, result in results.items():
            if result.theme == theme:
                lines += table_rows(result, (link / file.name).as_posix())
        if not page.exists():
            if lines == table_head(_COLUMNS):  # without results
                continue
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(f"# {THEMES[theme]}: all results\n\n{BEGIN}\n{END}\n")
        _replace(page, "\n".join(lines))


def _replace(path: pathlib.Path, text: str) -> None:
    """Replaces the text between the two lines of a file."""
    content = path.read_text() if path.is_file() else ""
    before, begin, rest = content.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        problem = "has no place for the results"
        remedy = f"write a file with the lines {BEGIN} and {END}"
        raise BenchError(Problem("table", str(path), problem, remedy))
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def table_rows(result: Result, link: str) -> list[str]:
    """Markdown lines of one result, one per comparison, linking to its file."""
    rows = []
    for case in result.cases:
        name = f"[{result.id}]({link})" + (f": {case.name}" if case.name else "")
        cells = (
            name,
            result.claim,
            describe_side(case.ours),
            describe_side(case.peer),
            f"**{case.ratio:.3f}**",
            _bar(case, result.higher_is_better),
            _bold_if_missed(verdict(case, result.higher_is_better)),
            _where(result),
            result.notes,
            f"`{result.command}`",
        )
        rows.append(table_line(cells))
    return rows


def _bar(case: Comparison, higher_is_better: bool) -> str:
    """The ratio that a case must reach, and the one it aims at."""
    bound = "at least" if higher_is_better else "at most"
    bars = {bound: case.must, "aim": case.aim}
    return ", ".join(f"{name} {x:g}" for name, x in bars.items() if x is not None)


def _bold_if_missed(meaning: str) -> str:
    return f"**{meaning}**" if meaning.startswith("missed") else meaning


def _where(result: Result) -> str:
    older = f"; **older revision**: {result.outdated}" if result.outdated else ""
    return f"{result.device}, {result.date}{older}"


def _order(file: pathlib.Path) -> tuple[str, int]:
    """Sort key: id, then number of devices."""
    found = re.fullmatch(r"(.+)_x(\d+)", file.stem)
    return (found[1], int(found[2])) if found else (file.stem, 0)
