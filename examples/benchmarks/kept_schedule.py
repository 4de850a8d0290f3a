"""The schedule of kept tokens that contests of random-LTD share, for time and quality.

Half of the tokens for most steps, then all. In short runs the loss is lower than with
fewer tokens first, whether they grow linearly (arXiv:2211.11586) or not.
"""

PHASES = ((1 / 2, 0.78),)
"""Shares of the tokens that are kept, and of the steps until which they are."""


def kept_tokens(length: int) -> list[int]:
    """Tokens that are kept in each phase."""
    return [round(share * length) for share, _ in PHASES]


def make_pacing(length: int, num_steps: int) -> dict:
    """The schedule as settings of `random_ltd.pacing`."""
    return {
        "kind": "discrete",
        "values": [*kept_tokens(length), length],
        "last_steps": [round(end * num_steps) for _, end in PHASES],
    }


def mean_of_run(seconds: list[float], whole: float) -> float:
    """Mean seconds of the steps of a run, over those of a whole step.

    Args:
        seconds: Seconds of a step of each of `kept_tokens`.
        whole: Seconds of a whole step.
    """
    mean, start = 0.0, 0.0
    for each, (_, end) in zip(seconds, PHASES, strict=True):
        mean += (end - start) * each / whole
        start = end
    return mean + 1 - start
