"""Numbers of a comparison, and lines of Markdown tables, as text."""

from collections.abc import Sequence

from zjax.bench.result import Side
from zjax.bench.spread import Spread
from zjax.sharding.describe import format_bytes


def format_number(value: int | float, unit: str) -> str:
    """A number of a side in a few digits.

    Args:
        value: Above 0.
        unit: Of the number; "bytes", and "bytes" per something, get a decimal prefix.

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
    """A formatted number and its unit.

    Args:
        text: Made by `format_number`.
        unit: The unit it was made with.

    Returns:
        Text in which the unit stands once.
    """
    return text if unit.startswith("bytes") else f"{text} {unit}"


def describe_side(side: Side) -> str:
    """Name, median and range of one side.

    Args:
        side: One number of a comparison.

    Returns:
        The text of a cell.
    """
    spread = Spread(side.median, side.min, side.max, side.n)
    text = spread.describe(lambda value: format_number(value, side.unit))
    return f"{side.name}: {with_unit(text, side.unit)}"


def table_line(cells: Sequence[str]) -> str:
    """One line of a Markdown table.

    Args:
        cells: Text of any kind.

    Returns:
        The line, in which a `|` of a cell does not end the cell.
    """
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def table_head(columns: Sequence[str]) -> list[str]:
    """The first two lines of a Markdown table.

    Args:
        columns: Their headings.

    Returns:
        Headings and rule.
    """
    return [table_line(columns), "|---" * len(columns) + "|"]
