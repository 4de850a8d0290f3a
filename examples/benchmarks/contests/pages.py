"""BENCHMARKS.md and a page per theme, rebuilt from the files of all results.

The summary has counts, headlines, and the names of results that missed their bar.
"""

import html
import itertools
import os
import pathlib
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from contests.contest import THEMES
from contests.result import (
    Comparison,
    Result,
    describe_median,
    describe_side,
    read_result,
    verdict,
)
from zjax.errors import BenchError, Problem

SUMMARY = "BENCHMARKS.md"
BEGIN = "<!-- results: written by examples/benchmarks/pages.py from the named files -->"
END = "<!-- end of results -->"
PAGES = pathlib.Path("docs", "benchmarks")
"""Folder of the theme pages, relative to the summary."""
COLUMNS = ("claim", "ours", "peer", "ours / peer", "verdict")
"""Columns of every table of comparisons."""
NUMBERS = COLUMNS[1:4]
"""Columns of a table of comparisons that hold numbers."""
_COUNTS = (
    "theme",
    "comparisons",
    "aim reached",
    "met",
    "missed",
    "no bar",
    "older revision",
)


def update_pages(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Rewrites the summary at `path` and the page of each theme from `folder/*.json`.

    Only the text between the lines `BEGIN` and `END` is rewritten. A missing page of a
    theme with results is created in `docs/benchmarks/`, beside the summary.
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
    """Tabulates results by the link to their file, and folds the details of each."""
    lines = table_head(COLUMNS, NUMBERS)
    for result in results.values():
        lines += table_rows(result)
    folds = [describe_details(result, link) for link, result in results.items()]
    return "\n\n".join(["\n".join(lines), "## Ranges, notes and commands", *folds])


def _replace(path: pathlib.Path, text: str) -> None:
    """Replaces the text between the lines `BEGIN` and `END` of a file.

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
    """Tabulates one result: a line per comparison, below the claim if several."""
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
    """Writes ranges, bars, device, notes and command of a result into a fold.

    The anchor is inside the fold, because browsers open a fold only for a link to
    something in it.
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
    """Formats the ratio that a case must reach and the ratio that it aims at."""
    bound = "at least" if higher_is_better else "at most"
    bars = {bound: case.must, "aim": case.aim}
    return ", ".join(f"{name} {x:g}" for name, x in bars.items() if x is not None)


def _order(name: str) -> tuple[str, int]:
    """Splits an id into the name of its row and a number of devices, 0 without one."""
    found = re.fullmatch(r"(.+)_x(\d+)", name)
    return (found[1], int(found[2])) if found else (name, 0)


def describe_results(results: Sequence[Result], links: Mapping[str, str]) -> str:
    """Writes the summary in Markdown, with links to the page of each theme."""
    parts = [
        count_verdicts(results),
        "\n".join(_counts(results, links)),
        "\n".join(_headlines(results, links)),
        *_named("Missed their bar", results, links, _is_missed),
        *_named("Behind the peer, within their bar", results, links, _is_behind),
        *_named("From an older revision", results, links, _is_outdated),
    ]
    return "\n\n".join(part for part in parts if part)


def count_verdicts(results: Iterable[Result]) -> str:
    """Counts the verdicts of some results in one sentence."""
    total, reached, met, missed, without_bar, old = _count(results)
    return (
        f"Of {total} comparisons, {reached} reach their aim, {met} meet their bar, "
        f"{missed} miss it and {without_bar} have no bar; {old} are from an older "
        "revision."
    )


def _counts(results: Sequence[Result], links: Mapping[str, str]) -> list[str]:
    """Tabulates the verdicts of each theme that has results."""
    lines = table_head(_COUNTS, _COUNTS[1:])
    for theme, heading in THEMES.items():
        chosen = [result for result in results if result.theme == theme]
        if chosen:
            numbers = map(str, _count(chosen))
            lines.append(table_line((f"[{heading}]({links[theme]})", *numbers)))
    return lines


def _count(results: Iterable[Result]) -> tuple[int, int, int, int, int, int]:
    """Counts comparisons, in the order of `_COUNTS`."""
    cases = [(result, case) for result in results for case in result.cases]
    found = [verdict(case, result.higher_is_better) for result, case in cases]
    return (
        len(cases),
        found.count("aim reached"),
        found.count("met"),
        sum(_is_missed(*case) for case in cases),
        found.count("no bar") + found.count("aim not reached"),
        sum(_is_outdated(*case) for case in cases),
    )


def _headlines(results: Iterable[Result], links: Mapping[str, str]) -> list[str]:
    """Lists claims with a headline by theme: each newest result, each worst case."""
    newest: dict[str, Result] = {}
    for result in results:
        claim = re.sub(r"_x\d+$", "", result.id)
        if result.headline and _age(result) >= _age(newest.get(claim)):
            newest[claim] = result
    chosen = sorted(
        newest.values(), key=lambda result: list(THEMES).index(result.theme)
    )
    if not chosen:
        return []
    lines = table_head(COLUMNS, NUMBERS)
    for theme, group in itertools.groupby(chosen, lambda result: result.theme):
        lines.append(heading_line(f"[{THEMES[theme]}]({links[theme]})"))
        lines += [_headline(result, links[theme]) for result in group]
    return lines


def _age(result: Result | None) -> tuple[bool, str]:
    """Sort key that is greater for a newer result; None is the oldest."""
    return (not result.outdated, result.date) if result else (False, "")


def _headline(result: Result, page: str) -> str:
    """Formats the line of one headline, which links to its details."""
    worst = min(result.cases, key=lambda case: _margin(case, result.higher_is_better))
    claim = result.headline
    if len(result.cases) > 1:
        claim = f"{claim} (worst of {len(result.cases)})"
    return comparison_line(f"[{claim}]({page}#{result.id})", result, worst)


def _margin(case: Comparison, higher_is_better: bool) -> float:
    """Divides a ratio by its bar; below 1 where the bar is missed."""
    margin = case.ratio / (case.must or case.aim or 1)
    return margin if higher_is_better else 1 / margin


def _is_missed(result: Result, case: Comparison) -> bool:
    """Whether a comparison misses its bar."""
    return verdict(case, result.higher_is_better).startswith("missed")


def _is_behind(result: Result, case: Comparison) -> bool:
    """Whether a comparison meets its bar although the peer is better."""
    behind = case.ratio < 1 if result.higher_is_better else case.ratio > 1
    return behind and not _is_missed(result, case)


def _is_outdated(result: Result, _: Comparison) -> bool:
    """Whether a comparison was measured with an older revision."""
    return bool(result.outdated)


def _named(
    heading: str,
    results: Iterable[Result],
    links: Mapping[str, str],
    belongs: Callable[[Result, Comparison], object],
) -> list[str]:
    """Links to the results with comparisons that belong, in at most one paragraph."""
    names, total = [], 0
    for result in results:
        chosen = [case for case in result.cases if belongs(result, case)]
        if chosen:
            of = f" ({len(chosen)} of {len(result.cases)})"
            name = f"[{result.id}]({links[result.theme]}#{result.id})"
            names.append(name + (of if len(result.cases) > 1 else ""))
            total += len(chosen)
    return [f"**{heading}** ({total}): {', '.join(names)}."] if names else []


def table_line(cells: Sequence[str]) -> str:
    """One line of a Markdown table; a `|` inside a cell is escaped."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def table_head(columns: Sequence[str], numbers: Container[str]) -> list[str]:
    """Headings and rule of a Markdown table; columns of `numbers` are right-aligned."""
    rules = ("---:" if column in numbers else "---" for column in columns)
    return [table_line(columns), f"|{'|'.join(rules)}|"]


def heading_line(text: str) -> str:
    """One line of a table of comparisons with a heading alone."""
    return table_line((f"**{text}**", *[""] * (len(COLUMNS) - 1)))


def comparison_line(claim: str, result: Result, case: Comparison) -> str:
    """One line of a table of comparisons; a verdict that misses its bar is bold."""
    meaning = verdict(case, result.higher_is_better)
    if meaning.startswith("missed"):
        meaning = f"**{meaning}**"
    cells = (
        claim,
        describe_median(case.ours),
        describe_median(case.peer),
        f"**{case.ratio:.4g}**",
        meaning + (", older" if result.outdated else ""),
    )
    return table_line(cells)
