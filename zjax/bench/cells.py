"""Text of numbers and of Markdown tables."""

from collections.abc import Container, Sequence

from zjax.bench.result import Comparison, Result, Side, verdict
from zjax.bench.spread import Spread
from zjax.sharding.describe import format_bytes

COLUMNS = ("claim", "ours", "peer", "ours / peer", "verdict")
"""Columns of every table of comparisons."""
NUMBERS = COLUMNS[1:4]
"""Columns of such a table that hold numbers."""


def format_number(value: int | float, unit: str) -> str:
    """A number above 0 in a few digits.

    Args:
        value: The number.
        unit: Its unit; "bytes", alone or per something, gets a decimal prefix.

    Returns:
        Text without the unit, except for bytes.

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


def with_unit(text: str, unit: str) -> str:
    """The text of `format_number` followed by its unit, unless it has one."""
    return text if unit.startswith("bytes") else f"{text} {unit}"


def describe_median(side: Side) -> str:
    """Median of one side with its unit."""
    return with_unit(format_number(side.median, side.unit), side.unit)


def describe_side(side: Side) -> str:
    """Name, median and range of one side."""
    spread = Spread(side.median, side.min, side.max, side.n)
    text = spread.describe(lambda value: format_number(value, side.unit))
    return f"{side.name}: {with_unit(text, side.unit)}"


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
    """One line of a table of comparisons: medians, their ratio and the verdict.

    Args:
        claim: Text of the first cell.
        result: The result that the comparison belongs to; an outdated one is marked.
        case: The comparison.

    Returns:
        A line with the cells of `COLUMNS`; a verdict that misses its bar is bold.
    """
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
