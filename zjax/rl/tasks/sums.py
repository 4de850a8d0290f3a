"""Sums of several numbers, with the running sum as working."""

import itertools
from typing import Any

from zjax.rl.tasks.operands import draw_operands, last_line


def rows(
    num_rows: int,
    *,
    seed: int = 0,
    level: int = 1,
    operands: range = range(100),
    held_out: bool = False,
) -> list[dict[str, Any]]:
    r"""Makes prompts with the numbers to add.

    Args:
        num_rows: Number of rows.
        seed: Seed of the numbers.
        level: Number of additions, 1 or more.
        operands: Numbers to add, 20 or more, 0 or more each.
        held_out: Whether all numbers are of the middle tenth, of which other rows
            have one at most.

    Returns:
        Records with `prompt`, `operands` and `answer`.

    Raises:
        ConfigError: `level` is below 1, or the range has fewer than 20 numbers.

    Example:
        >>> [row] = rows(1, level=2)
        >>> row["prompt"], row["answer"]
        ('0+94+75\n', 169)
    """
    drawn = draw_operands(num_rows, seed, level, operands, held_out=held_out)
    return [
        {"prompt": "+".join(map(str, x)) + "\n", "operands": x, "answer": sum(x)}
        for x, _ in drawn
    ]


def trace(row: dict[str, Any], *, working: bool = True) -> str:
    r"""Writes a solved completion.

    Args:
        row: Record of `rows`.
        working: Whether to write each running sum before the answer.

    Example:
        >>> trace({"operands": [3, 9, 5], "answer": 17})
        '3+9=12\n12+5=17\n17'
    """
    total = [*itertools.accumulate(row["operands"])]
    steps = zip(total, row["operands"][1:], total[1:], strict=False)
    lines = [f"{before}+{x}={after}" for before, x, after in steps]
    return "\n".join([*lines * working, str(row["answer"])])


def reward(prompt: str, completion: str, *, answer: int, **row: Any) -> float:
    r"""Returns 1 if the last line of the completion is the sum, else 0.

    Example:
        >>> [reward("3+9", x, answer=12) for x in ("3+9=12\n12", "21")]
        [1.0, 0.0]
    """
    return float(last_line(completion) == str(answer))
