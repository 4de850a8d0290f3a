"""BENCHMARKS.md: one table of all results, rebuilt from their files."""

import os
import pathlib
import re
from collections.abc import Sequence

from zjax.bench.result import Comparison, Result, Side, read_result, verdict
from zjax.bench.spread import Spread
from zjax.errors import BenchError, Problem
from zjax.sharding.describe import format_bytes

BEGIN = "<!-- results: written by `zjax bench --contest`, from the files it names -->"
END = "<!-- end of results -->"
_COLUMNS = (
    "row",
    "claim",
    "ours",
    "peer",
    "ours / peer",
    "asked",
    "verdict",
    "where",
    "notes",
    "command",
)


def update_table(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Rewrites the table in a Markdown file; what is around it stays.

    Args:
        path: A file with the two lines `BEGIN` and `END`.
        folder: Holds the results, `*.json`.

    Raises:
        BenchError: The file has no place for the table, or a result is not sound.
    """
    path, folder = pathlib.Path(path), pathlib.Path(folder)
    text = path.read_text() if path.is_file() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        problem = "has no place for the results"
        remedy = f"write a file with the lines {BEGIN} and {END}"
        raise BenchError(Problem("table", str(path), problem, remedy))
    link = pathlib.Path(os.path.relpath(folder, path.parent))
    lines = [_line(_COLUMNS), "|---" * len(_COLUMNS) + "|"]
    results = []
    for file in sorted(folder.glob("*.json"), key=_order):
        results.append(read_result(file))
        lines += table_rows(results[-1], (link / file.name).as_posix())
    table = "\n".join(lines)
    told = f"{BEGIN}\n\n{count_verdicts(results)}\n\n{table}\n\n{END}"
    path.write_text(f"{before}{told}{after}")


def count_verdicts(results: Sequence[Result]) -> str:
    """How the comparisons of some results stand.

    Args:
        results: What was found.

    Returns:
        One sentence.
    """
    found = [
        verdict(case, result.higher_is_better)
        for result in results
        for case in result.cases
    ]
    missed = sum(meaning.startswith("missed") for meaning in found)
    unasked = found.count("no bar") + found.count("aim not reached")
    old = sum(len(result.cases) for result in results if result.outdated)
    return (
        f"Of {len(found)} comparisons {found.count('aim reached')} reach their aim, "
        f"{found.count('met')} meet what was asked, {missed} miss it, and of {unasked} "
        f"no more than an aim was stated, if that; {old} are of an older revision."
    )


def table_rows(result: Result, link: str) -> list[str]:
    """The lines of one result.

    Args:
        result: What was found.
        link: To its file.

    Returns:
        One line of Markdown per comparison.
    """
    rows = []
    for case in result.cases:
        name = f"[{result.id}]({link})" + (f": {case.name}" if case.name else "")
        cells = (
            name,
            result.claim,
            _describe(case.ours),
            _describe(case.peer),
            f"**{case.ratio:.3f}**",
            _asked(case, result.higher_is_better),
            _bold_if_missed(verdict(case, result.higher_is_better)),
            _where(result),
            result.notes,
            f"`{result.command}`",
        )
        rows.append(_line(cells))
    return rows


def format_number(value: int | float, unit: str) -> str:
    """A number of a side in a few digits.

    Args:
        value: Above 0.
        unit: Of the number; "bytes" get a decimal prefix.

    Returns:
        Text without the unit, except for bytes.

    Example:
        >>> format_number(45973.2, "tokens/s"), format_number(0.5412, "MFU")
        ('45,973', '0.5412')
    """
    if unit == "bytes":
        return format_bytes(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _describe(side: Side) -> str:
    spread = Spread(side.median, side.min, side.max, side.n)
    text = spread.describe(lambda value: format_number(value, side.unit))
    unit = "" if side.unit == "bytes" else f" {side.unit}"
    return f"{side.name}: {text}{unit}"


def _asked(case: Comparison, higher_is_better: bool) -> str:
    bound = "at least" if higher_is_better else "at most"
    bars = {bound: case.must, "aim": case.aim}
    return ", ".join(f"{name} {x:g}" for name, x in bars.items() if x is not None)


def _bold_if_missed(meaning: str) -> str:
    return f"**{meaning}**" if meaning.startswith("missed") else meaning


def _where(result: Result) -> str:
    older = f"; **older revision**: {result.outdated}" if result.outdated else ""
    return f"{result.device}, {result.date}{older}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _order(file: pathlib.Path) -> tuple[str, int]:
    """By id, then by number of devices."""
    found = re.fullmatch(r"(.+)_x(\d+)", file.stem)
    return (found[1], int(found[2])) if found else (file.stem, 0)
