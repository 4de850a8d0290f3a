"""The schedule of kept tokens that contests of random-LTD share, for time and quality.

They grow linearly from few to all (arXiv:2211.11586); the last steps are whole.
"""

END = 0.85
"""Share of the steps that drop tokens."""
QUARTERS = 4
"""Sizes that stand for those of the growing part."""


def kept_tokens(length: int) -> list[int]:
    """Sizes of subsets at the middle of each quarter of the steps that drop tokens."""
    return [length * (2 * i + 1) // (2 * QUARTERS) for i in range(QUARTERS)]


def mean_of_run(quarters: list[float], whole: float) -> float:
    """Mean seconds of the steps of a run, over those of a whole step.

    Args:
        quarters: Seconds of a step of each of `kept_tokens`.
        whole: Seconds of a whole step.
    """
    return END * sum(quarters) / len(quarters) / whole + (1 - END)
