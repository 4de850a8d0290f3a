"""Text of numbers and of Markdown tables."""

from collections.abc import Sequence

from zjax.bench.result import Side
from zjax.bench.spread import Spread
from zjax.sharding.describe import format_bytes


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
    """
    if unit.startswith("bytes"):
        return format_bytes(value) + unit.removeprefix("bytes")
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def with_unit(text: str, unit: str) -> str:
    """The text of `format_number` followed by its unit, unless it has one."""
    return text if unit.startswith("bytes") else f"{text} {unit}"


def describe_side(side: Side) -> str:
    """Name, median and range of one side."""
    spread = Spread(side.median, side.min, side.max, side.n)
    text = spread.describe(lambda value: format_number(value, side.unit))
    return f"{side.name}: {with_unit(text, side.unit)}"


def table_line(cells: Sequence[str]) -> str:
    """One line of a Markdown table; a `|` inside a cell is escaped."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def table_head(columns: Sequence[str]) -> list[str]:
    """Headings and rule of a Markdown table."""
    return [table_line(columns), "|---" * len(columns) + "|"]
