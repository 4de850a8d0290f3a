"""Themes of claims; each has one page of results."""

from typing import Literal, get_args

Theme = Literal["speed", "memory", "offload", "sparse_attention", "parallelism"]
THEMES: dict[str, str] = {
    theme: theme.replace("_", " ").capitalize() for theme in get_args(Theme)
}
"""Headings by theme, in the order of the summary."""
