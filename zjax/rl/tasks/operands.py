"""Operands of tasks: a middle tenth of the range is held out."""

import random
from collections.abc import Iterator

from zjax.errors import ConfigError, Problem

LEAST = 20
"""Fewest operands of a range, so that some are held out."""


def split_operands(operands: range, *, held_out: bool) -> list[int]:
    """Lists the operands for training, or the held-out operands.

    The held-out operands are the middle tenth: of 0 to 99, these are 45 to 54, whose
    digits all occur in each place of further operands.

    Example:
        >>> split_operands(range(100), held_out=True) == [*range(45, 55)]
        True
    """
    size = len(operands)
    start, stop = 9 * size // 20, 11 * size // 20
    inside = operands[start:stop]
    return [*inside] if held_out else [x for x in operands if x not in inside]


def draw_operands(
    num_rows: int, seed: int, level: int, operands: range, *, held_out: bool
) -> Iterator[tuple[list[int], random.Random]]:
    """Draws `level + 1` operands for each row, with the generator of further draws.

    Raises:
        ConfigError: `level` is below 1, or the range has fewer than 20 operands.
    """
    problems = []
    if level < 1:
        problems.append(Problem("level", level, "is below 1", "use 1 or more"))
    if len(operands) < LEAST:
        problem = f"has {len(operands)} operands, of which none is held out"
        remedy = f"use {LEAST} or more"
        problems.append(Problem("operands", operands, problem, remedy))
    if problems:
        raise ConfigError(*problems)
    chosen = split_operands(operands, held_out=held_out)
    for number in range(num_rows):
        # Any part of the rows can be made alone.
        draws = random.Random(f"{seed} {level} {held_out} {number}")
        yield [draws.choice(chosen) for _ in range(level + 1)], draws


def last_line(completion: str) -> str:
    """Returns the answer of a completion: the last line that is not blank."""
    lines = completion.strip().splitlines()
    return lines[-1].strip() if lines else ""
