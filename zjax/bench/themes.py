"""What claims are about: one page of results each."""

from typing import Literal, get_args

Theme = Literal["speed", "memory", "offload", "sparse_attention", "parallelism"]
THEMES: dict[str, str] = {
    theme: theme.replace("_", " ").capitalize() for theme in get_args(Theme)
}
"""Headings of the themes, in the order of the summary."""
