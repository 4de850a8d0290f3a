"""Formats a converted ds_config as a config file, a table and a summary."""

import math
from collections.abc import Sequence
from typing import Any

from zjax.deepspeed.table import Conversion
from zjax.settings.derived import is_offered


def config_file(found: Conversion) -> str:
    """Formats the settings as a Python config file for `zjax train --config`."""
    lines = [
        "from zjax.config import base",
        "",
        "",
        "def get_config():",
        "    config = base()",
        "    # Batch sizes, optimizer, precision and memory are those of DeepSpeed.",
        *(
            f"    {_ONLY_FLOAT16 * is_offered(value)}config.{path} = {_literal(value)}"
            for path, value in found.settings.items()
        ),
        "    return config",
    ]
    return "\n".join(lines) + "\n"


_ONLY_FLOAT16 = "# Add where compute_dtype is float16: "
"""Precedes settings of loss scales, the only settings offered by a conversion."""


def _literal(value: Any) -> str:
    """Formats a value as Python source."""
    return 'float("inf")' if value == math.inf else repr(value)


def table_rows(found: Conversion) -> list[tuple[str, ...]]:
    """Cells of a table: key, value, verdict and note, with a heading per section."""
    rows, last = list[tuple[str, ...]](), ""
    for row in found.rows:
        section, _, inside = row.key.partition(".")
        heading = f"{section}{', by default' * row.is_default}"
        if inside and heading != last:
            rows.append((heading, "", "", ""))
        last = heading
        name = f"  {inside}" if inside else heading
        rows.append((name, _short(row.value), row.verdict, row.note))
    return rows


def summary(found: Conversion) -> str:
    """Counts the keys of each verdict."""
    verdicts: Sequence[str] = [row.verdict for row in found.rows if not row.is_default]
    counts = {name: verdicts.count(name) for name in dict.fromkeys(verdicts)}
    return ", ".join(f"{number} {name}" for name, number in counts.items())


def _short(value: Any) -> str:
    """Formats a value in at most 12 characters."""
    text = repr(value)
    return text if len(text) <= 12 else f"{text[:9]}..."
