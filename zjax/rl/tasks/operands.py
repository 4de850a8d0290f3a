"""Operands of tasks: pairs of the middle tenth of a range are held out."""

import random
from collections.abc import Iterator

from zjax.errors import ConfigError, Problem

LEAST = 20
"""Fewest operands of a range, so that some are held out."""


def held_out_operands(operands: range) -> range:
    """Returns the held-out part of a range, the middle tenth.

    Example:
        >>> held_out_operands(range(100))
        range(45, 55)
    """
    size = len(operands)
    return operands[9 * size // 20 : 11 * size // 20]


def draw_operands(
    num_rows: int, seed: int, level: int, operands: range, *, held_out: bool
) -> Iterator[tuple[list[int], random.Random]]:
    """Draws `level + 1` operands for each row, with the generator of further draws.

    A held-out row has operands of the held-out range alone, and a row to train on has
    one of this range at most: a model then knows how to write each held-out operand,
    and has seen no two of them together.

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
    new = held_out_operands(operands)
    chosen = new if held_out else operands
    for number in range(num_rows):
        # Any part of the rows can be made alone.
        draws = random.Random(f"{seed} {level} {held_out} {number}")
        given = [draws.choice(chosen) for _ in range(level + 1)]
        while not held_out and sum(x in new for x in given) > 1:
            given = [draws.choice(chosen) for _ in range(level + 1)]
        yield given, draws


def last_line(completion: str) -> str:
    """Returns the answer of a completion: the last line that is not blank."""
    lines = completion.strip().splitlines()
    return lines[-1].strip() if lines else ""
