"""Reversing text: words of three letters, with each reversed word as working."""

import string
from typing import Any

from zjax.rl.tasks.operands import draw_operands, last_line

_LETTERS = string.ascii_lowercase
NUM_WORDS = len(_LETTERS) ** 3


def rows(
    num_rows: int,
    *,
    seed: int = 0,
    level: int = 1,
    operands: range = range(NUM_WORDS),
    held_out: bool = False,
) -> list[dict[str, Any]]:
    r"""Makes prompts with the words to reverse.

    Args:
        num_rows: Number of rows.
        seed: Seed of the words.
        level: Number of words without the first, 1 or more.
        operands: Numbers of words in the order of a dictionary, 20 or more, from 0
            (`aaa`) to 17,575 (`zzz`).
        held_out: Whether all words are of the middle tenth, of which other rows
            have one at most.

    Returns:
        Records with `prompt`, `operands` (the numbers of the words) and `answer`.

    Raises:
        ConfigError: `level` is below 1, or the range has fewer than 20 words.

    Example:
        >>> [row] = rows(1)
        >>> row["prompt"], row["answer"]
        ('icy hzj\n', 'jzh yci')
    """
    drawn = draw_operands(num_rows, seed, level, operands, held_out=held_out)
    found = ((x, " ".join(map(_word, x))) for x, _ in drawn)
    return [{"prompt": t + "\n", "operands": x, "answer": t[::-1]} for x, t in found]


def trace(row: dict[str, Any], *, working: bool = True) -> str:
    r"""Writes a solved completion.

    Args:
        row: Record of `rows`.
        working: Whether to write each reversed word before the answer.

    Example:
        >>> trace({"operands": [28, 1], "answer": "baa cba"})
        'aab>baa\nabc>cba\nbaa cba'
    """
    words = [_word(number) for number in reversed(row["operands"])]
    lines = [f"{word}>{word[::-1]}" for word in words]
    return "\n".join([*lines * working, row["answer"]])


def reward(prompt: str, completion: str, *, answer: str, **row: Any) -> float:
    r"""Returns 1 if the last line of the completion is the reversed text, else 0.

    Example:
        >>> reward("abc\n", "cba", answer="cba"), reward("abc\n", "abc", answer="cba")
        (1.0, 0.0)
    """
    return float(last_line(completion) == answer)


def _word(number: int) -> str:
    """Writes a number with letters for digits, in base 26."""
    high, low = divmod(number, len(_LETTERS))
    return _LETTERS[high // 26] + _LETTERS[high % 26] + _LETTERS[low]
