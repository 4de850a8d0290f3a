"""Reward functions that processes import in no time."""


def plain(prompt, completion, **row):
    """Share of letters that random weights draw half of the time."""
    return sum(ord(letter) < 128 for letter in completion) / max(len(completion), 1)


def constant(prompt, completion, **row):
    """The same reward for all."""
    return 0.5


def fails_for_some(prompt, completion, **row):
    """Raises for prompts without a letter."""
    if not row["letter"]:
        raise ValueError("no judgement")
    return 0.5
