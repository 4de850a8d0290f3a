"""Results of comparisons, and their files `examples/benchmarks/results/*.json`.

A file holds `id, claim, theme, headline, command, date, device, versions`, then `ours,
peer, must, aim, ratio` (or `cases`, a list of these five with a `name` each), then
`higher_is_better`, `notes` and `outdated`. A side is `name, median, min, max, n, unit`.
The ratio is ours over the peer's; `must` and `aim` are the required and the hoped-for
ratio, or null.
"""

import dataclasses
import datetime
import json
import math
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from contests.contest import THEMES
from zjax.errors import BenchError, Problem
from zjax.files import parse_json, read_text
from zjax.run.bench import Spread
from zjax.sharding.describe import format_bytes

_ID = re.compile(r"[a-z0-9_]+")
_CASE_KEYS = ("ours", "peer", "must", "aim", "ratio")


@dataclasses.dataclass(frozen=True)
class Side:
    """One number of a comparison; `n` is 1 if it is counted or stated."""

    name: str
    median: int | float
    min: int | float
    max: int | float
    n: int
    unit: str


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two numbers of one kind.

    Args:
        name: Name within the result; empty if it is the only one.
        ours: Number of zjax.
        peer: Number it is compared with.
        must: Required ratio, a minimum (a maximum where lower is better), or None.
        aim: Ratio that is hoped for, or None.
    """

    name: str
    ours: Side
    peer: Side
    must: int | float | None = None
    aim: int | float | None = None

    @property
    def ratio(self) -> float:
        """Number of zjax over the number of the peer."""
        return self.ours.median / self.peer.median


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of one claim.

    Args:
        id: Lower-case letters, digits and underscores.
        claim: One sentence that the ratios support or refute.
        theme: Key of `THEMES`.
        headline: The claim in a few words; if empty, the summary names the result only
            if it missed its bar.
        command: Command, run from the root of the repository.
        date: Date of the measurement, YYYY-MM-DD.
        device: Number and kind of the devices.
        versions: Versions of the software on both sides.
        cases: One comparison, or several with names.
        higher_is_better: Whether a ratio above 1 favours zjax.
        notes: Remarks for the reader.
        outdated: How the measurement differs from what the command measures now, if it
            cannot be repeated at once; else empty.
    """

    id: str
    claim: str
    theme: str
    headline: str
    command: str
    date: str
    device: str
    versions: Mapping[str, str]
    cases: tuple[Comparison, ...]
    higher_is_better: bool
    notes: str
    outdated: str = ""

    def to_json(self) -> dict[str, Any]:
        """Lists the fields in order as a file stores them, a lone comparison flat."""
        cases = [
            dataclasses.asdict(case) | {"ratio": case.ratio} for case in self.cases
        ]
        stored: dict[str, Any] = {"cases": cases}
        if len(cases) == 1:
            stored = {key: cases[0][key] for key in _CASE_KEYS}
        found: dict[str, Any] = {}
        for name, value in dataclasses.asdict(self).items():
            found |= stored if name == "cases" else {name: value}
        return found


def verdict(case: Comparison, higher_is_better: bool) -> str:
    """Judges a ratio against the bar and the aim of its row; a miss is in % of the bar.

    Example:
        >>> sides = [Side("", n, n, n, 1, "s") for n in (57, 100)]
        >>> case = Comparison("", *sides, must=0.6, aim=0.5)
        >>> verdict(case, True), verdict(case, False)
        ('missed by 5 %', 'met')
    """

    def reaches(wanted: int | float) -> bool:
        return case.ratio >= wanted if higher_is_better else case.ratio <= wanted

    if case.must is not None and not reaches(case.must):
        gap = 100 * abs(case.ratio / case.must - 1)
        return f"missed by {gap:{'.2g' if gap < 99.5 else ',.0f'}} %"
    if case.aim is not None and reaches(case.aim):
        return "aim reached"
    if case.must is not None:
        return "met"
    return "no bar" if case.aim is None else "aim not reached"


def write_result(result: Result, folder: str | os.PathLike[str]) -> pathlib.Path:
    """Checks a result and writes it to `<id>.json` in a folder, created if missing."""
    problems = list(result_problems(result))
    if problems:
        raise BenchError(*problems)
    path = pathlib.Path(folder) / f"{result.id}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result.to_json(), indent=2) + "\n")
    return path


def read_result(path: str | os.PathLike[str]) -> Result:
    """Reads and checks a file of `write_result`."""
    remedy = "write it again by its contest"
    try:
        given = parse_json(read_text(path))
        cases = given.pop("cases", None)
        if cases is None:
            sides = {key: given.pop(key) for key in _CASE_KEYS}
            cases = [{"name": "", **sides}]
        ratios = [case.pop("ratio") for case in cases]
        result = Result(**given, cases=tuple(map(_comparison, cases)))
        problems = list(result_problems(result))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        problem = f"is not a result ({type(error).__name__}: {error})"
        raise BenchError(Problem("result", str(path), problem, remedy)) from error
    if not problems:
        problems = [
            Problem("ratio", ratio, f"is not ours / peer = {case.ratio!r}", remedy)
            for ratio, case in zip(ratios, result.cases, strict=True)
            if ratio != case.ratio
        ]
    if problems:
        raise BenchError(*problems)
    return result


def result_problems(result: Result) -> Iterator[Problem]:
    """Yields a problem for each mistake in a result."""
    if not _ID.fullmatch(result.id):
        remedy = "use lower-case letters, digits and underscores"
        yield Problem("id", result.id, "is not a name for a file", remedy)
    for field in ("claim", "command", "device"):
        if not getattr(result, field).strip():
            yield Problem(field, "", "says nothing", "write one line")
    if result.theme not in THEMES:
        remedy = f"use {', '.join(THEMES)}"
        yield Problem("theme", result.theme, "is not a theme", remedy)
    try:
        datetime.date.fromisoformat(result.date)
    except ValueError:
        yield Problem("date", result.date, "is not a date", "use YYYY-MM-DD")
    names = [case.name for case in result.cases]
    if not names:
        yield Problem("cases", (), "compares nothing", "give a comparison")
    if len(names) > 1 and (not all(names) or len(set(names)) < len(names)):
        problem = "does not tell the comparisons apart"
        yield Problem("cases", tuple(names), problem, "give each its own name")
    for case in result.cases:
        yield from _case_problems(case)


def _case_problems(case: Comparison) -> Iterator[Problem]:
    """Yields a problem for each mistake in a comparison."""
    for label, side in (("ours", case.ours), ("peer", case.peer)):
        field = f"{case.name}.{label}".lstrip(".")
        numbers = (side.min, side.median, side.max)
        if not all(math.isfinite(x) and x > 0 for x in numbers):
            problem = "are not finite numbers above 0"
            yield Problem(field, numbers, problem, "measure again")
        elif list(numbers) != sorted(numbers):
            problem = "are not min <= median <= max"
            yield Problem(field, numbers, problem, "sort the measurements")
        if side.n < 1:
            yield Problem(f"{field}.n", side.n, "is below 1", "measure at least once")
        for part in ("name", "unit"):
            if not getattr(side, part):
                yield Problem(f"{field}.{part}", "", "is missing", "say what it is")
    for label in ("must", "aim"):
        bar = getattr(case, label)
        field = f"{case.name}.{label}".lstrip(".")
        if bar is not None and not (math.isfinite(bar) and bar > 0):
            yield Problem(field, bar, "is not a finite ratio above 0", "state one")
    if case.ours.unit != case.peer.unit:
        problem = f"is not that of the peer, {case.peer.unit!r}"
        remedy = "compare numbers of one kind"
        field = f"{case.name}.unit".lstrip(".")
        yield Problem(field, case.ours.unit, problem, remedy)


def _comparison(given: Mapping[str, Any]) -> Comparison:
    """Reads a comparison as a file stores it."""
    return Comparison(
        name=given["name"],
        ours=Side(**given["ours"]),
        peer=Side(**given["peer"]),
        must=given["must"],
        aim=given["aim"],
    )


def format_number(value: int | float, unit: str) -> str:
    """Formats a number above 0 in a few digits; bytes alone with their unit.

    Example:
        >>> format_number(45973.2, "tokens/s"), format_number(0.5412, "MFU")
        ('45,973', '0.5412')
        >>> format_number(93_535_041_222, "bytes/s")
        '93.54 GB/s'
        >>> format_number(31_831_597_056, "parameters")
        '31.83 billion'
    """
    if unit.startswith("bytes"):
        return format_bytes(value) + unit.removeprefix("bytes")
    if value >= 1e9:
        return f"{value / 1e9:,.4g} billion"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def describe_median(side: Side) -> str:
    """Formats the median of one side with its unit."""
    return _with_unit(format_number(side.median, side.unit), side.unit)


def describe_side(side: Side) -> str:
    """Formats name, median and range of one side."""
    spread = Spread(side.median, side.min, side.max, side.n)
    text = spread.describe(lambda value: format_number(value, side.unit))
    return f"{side.name}: {_with_unit(text, side.unit)}"


def _with_unit(text: str, unit: str) -> str:
    """Appends its unit to a number of `format_number`, unless the number has it."""
    return text if unit.startswith("bytes") else f"{text} {unit}"
