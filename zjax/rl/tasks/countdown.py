"""Countdown: an expression of given numbers that makes a target, found by search."""

import ast
import fractions
import itertools
import operator
import random
import re
from collections.abc import Iterator
from typing import Any

from zjax.rl.tasks.operands import draw_operands, last_line

MAX_PRODUCT = 999
"""Largest product that a target or a search contains."""
_EXPRESSION = re.compile(r"[0-9+*/() -]{1,200}")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}

Number = tuple[int, str]
"""A value, and the expression that makes it."""


def rows(
    num_rows: int,
    *,
    seed: int = 0,
    level: int = 1,
    operands: range = range(1, 100),
    held_out: bool = False,
) -> list[dict[str, Any]]:
    r"""Makes prompts with numbers, and a target that an expression of them makes.

    Args:
        num_rows: Number of rows.
        seed: Seed of the numbers and targets.
        level: Number of operations, 1 or more. The search of `trace` tries about 2, 7
            and 60 operations at the levels 1, 2 and 3.
        operands: Numbers to use, 20 or more, each 1 or more.
        held_out: Whether all numbers are of the middle tenth, of which other rows
            have one at most.

    Returns:
        Records with `prompt`, `operands` and `target`.

    Raises:
        ConfigError: `level` is below 1, or the range has fewer than 20 numbers.

    Example:
        >>> [row] = rows(1)
        >>> row["prompt"], row["target"]
        ('22 22 make 484\n', 484)
    """
    found = []
    drawn = draw_operands(num_rows, seed, level, operands, held_out=held_out)
    for given, draws in drawn:
        numbers = [(x, str(x)) for x in given]
        while len(numbers) > 1:
            _, numbers = draws.choice([*_operations(numbers)])
        target = numbers[0][0]
        prompt = f"{' '.join(map(str, given))} make {target}\n"
        found.append({"prompt": prompt, "operands": given, "target": target})
    return found


def trace(row: dict[str, Any], *, working: bool = True) -> str:
    """Writes a solved completion.

    Args:
        row: Record of `rows`.
        working: Whether to write the operations that a search in random order tries
            before the answer.

    Example:
        >>> print(trace({"prompt": "3 7 make 21", "operands": [3, 7], "target": 21}))
        7+3=10
        7-3=4
        7*3=21
        7*3
    """
    lines: list[str] = []
    numbers = [(x, str(x)) for x in row["operands"]]
    answer = _search(numbers, row["target"], random.Random(row["prompt"]), lines)
    assert answer is not None
    return "\n".join([*lines * working, answer])


def reward(
    prompt: str, completion: str, *, operands: list[int], target: int, **row: Any
) -> float:
    r"""Returns 1 if the last line makes the target with each number once, else 0.

    The line is an expression of integers, `+`, `-`, `*`, `/` and parentheses, with 200
    characters at most.

    Example:
        >>> given = {"operands": [3, 7, 4], "target": 25}
        >>> [reward("", x, **given) for x in ("3*7=21\n(3*7)+4", "21+4", "4*7-3*1")]
        [1.0, 0.0, 0.0]
    """
    text = last_line(completion)
    if not _EXPRESSION.fullmatch(text):
        return 0.0
    try:
        value, used = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ArithmeticError, KeyError):
        return 0.0
    return float(value == target and sorted(used) == sorted(operands))


def _evaluate(node: Any) -> tuple[fractions.Fraction, list[int]]:
    """Evaluates an expression exactly, and lists the numbers that occur in it."""
    match node:
        case ast.Constant(value=int(value)):
            return fractions.Fraction(value), [value]
        case ast.BinOp():
            (x, left), (y, right) = _evaluate(node.left), _evaluate(node.right)
            return _OPERATORS[type(node.op)](x, y), left + right
    raise SyntaxError("no number and no operation on two")


def _operations(numbers: list[Number]) -> Iterator[tuple[str, list[Number]]]:
    """Yields each operation on two numbers: as a line, and the numbers after it."""
    for pair in itertools.combinations(range(len(numbers)), 2):
        (b, y), (a, x) = sorted(numbers[place] for place in pair)
        others = [n for place, n in enumerate(numbers) if place not in pair]
        for sign, value in (("+", a + b), ("-", a - b), ("*", a * b)):
            if value > 0 and (sign != "*" or value <= MAX_PRODUCT):
                result = value, f"({x}{sign}{y})"
                yield f"{a}{sign}{b}={value}", [*others, result]


def _search(
    numbers: list[Number], target: int, draws: random.Random, lines: list[str]
) -> str | None:
    """Searches depth first for an expression, and adds each operation to `lines`."""
    if len(numbers) == 1:
        value, expression = numbers[0]
        return expression[1:-1] if value == target else None
    operations = [*_operations(numbers)]
    draws.shuffle(operations)
    for line, remaining in operations:
        lines.append(line)
        if (found := _search(remaining, target, draws, lines)) is not None:
            return found
    return None
