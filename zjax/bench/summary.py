"""The summary of all results: counts, headlines, and what missed its bar."""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from zjax.bench.cells import (
    COLUMNS,
    NUMBERS,
    comparison_line,
    heading_line,
    table_head,
    table_line,
)
from zjax.bench.result import Comparison, Result, verdict
from zjax.bench.themes import THEMES

_COUNTS = (
    "theme",
    "comparisons",
    "aim reached",
    "met",
    "missed",
    "no bar",
    "older revision",
)


def describe_results(results: Sequence[Result], links: Mapping[str, str]) -> str:
    """The summary in Markdown.

    Args:
        results: All results.
        links: Link to the page of each theme.

    Returns:
        One sentence, counts per theme, a line per headline, and the names of results
        that missed their bar, are behind their peer, or are from an older revision.
    """
    parts = [
        count_verdicts(results),
        "\n".join(_counts(results, links)),
        "\n".join(_headlines(results, links)),
        *_named("Missed their bar", results, links, _is_missed),
        *_named("Behind the peer, within their bar", results, links, _is_behind),
        *_named("From an older revision", results, links, _is_outdated),
    ]
    return "\n\n".join(part for part in parts if part)


def count_verdicts(results: Sequence[Result]) -> str:
    """One sentence that counts the verdicts of some results."""
    found = _verdicts(results)
    missed = sum(meaning.startswith("missed") for meaning in found)
    without_bar = found.count("no bar") + found.count("aim not reached")
    old = sum(len(result.cases) for result in results if result.outdated)
    return (
        f"Of {len(found)} comparisons, {found.count('aim reached')} reach their aim, "
        f"{found.count('met')} meet their bar, {missed} miss it and {without_bar} have "
        f"no bar; {old} are from an older revision."
    )


def _verdicts(results: Iterable[Result]) -> list[str]:
    return [
        verdict(case, result.higher_is_better)
        for result in results
        for case in result.cases
    ]


def _counts(results: Sequence[Result], links: Mapping[str, str]) -> list[str]:
    lines = table_head(_COUNTS, _COUNTS[1:])
    for theme, heading in THEMES.items():
        chosen = [result for result in results if result.theme == theme]
        if not chosen:
            continue
        found = _verdicts(chosen)
        numbers = (
            len(found),
            found.count("aim reached"),
            found.count("met"),
            sum(meaning.startswith("missed") for meaning in found),
            found.count("no bar") + found.count("aim not reached"),
            sum(len(result.cases) for result in chosen if result.outdated),
        )
        lines.append(table_line((f"[{heading}]({links[theme]})", *map(str, numbers))))
    return lines


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
    """The ratio over its bar; below 1 where the bar is missed."""
    margin = case.ratio / (case.must or case.aim or 1)
    return margin if higher_is_better else 1 / margin


def _is_missed(result: Result, case: Comparison) -> bool:
    return verdict(case, result.higher_is_better).startswith("missed")


def _is_behind(result: Result, case: Comparison) -> bool:
    behind = case.ratio < 1 if result.higher_is_better else case.ratio > 1
    return behind and not _is_missed(result, case)


def _is_outdated(result: Result, _: Comparison) -> bool:
    return bool(result.outdated)


def _named(
    heading: str,
    results: Iterable[Result],
    links: Mapping[str, str],
    belongs: Callable[[Result, Comparison], object],
) -> list[str]:
    """One paragraph that links to the results for which some comparison belongs."""
    names, total = [], 0
    for result in results:
        chosen = [case for case in result.cases if belongs(result, case)]
        if chosen:
            of = f" ({len(chosen)} of {len(result.cases)})"
            name = f"[{result.id}]({links[result.theme]}#{result.id})"
            names.append(name + (of if len(result.cases) > 1 else ""))
            total += len(chosen)
    return [f"**{heading}** ({total}): {', '.join(names)}."] if names else []
