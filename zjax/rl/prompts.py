"""Prompts of reinforcement learning: records of a file, in an order drawn by seed."""

import dataclasses
import io
import json
import pathlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from zjax.data.draws import Sampler
from zjax.data.prompts import Prompts
from zjax.errors import ConfigError, DataError, Problem
from zjax.files import parse_json, read_text

MAX_BYTES = 1 << 30
"""Most bytes of a file of prompts."""
_MOST_TOLD = 3
"""Most lines at fault that an error names."""
_GIVEN = ("prompt", "messages")


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt to draw texts from.

    Args:
        given: Text, or the messages of a conversation.
        ids: Tokens of the prompt, int32[m].
        row: Further fields of the record, which reward functions read.
    """

    given: str | Sequence[Mapping[str, Any]]
    ids: np.ndarray
    row: Mapping[str, Any]


def read_rows(field: str, path: str) -> list[dict[str, Any]]:
    """Reads the records of JSON Lines; one error names the lines at fault."""
    remedy = "give JSON Lines with 'prompt' or 'messages' in each"
    try:
        lines = io.StringIO(read_text(pathlib.Path(path), MAX_BYTES)).readlines()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        problem = f"cannot be read ({why})"
        raise DataError(Problem(field, path, problem, remedy)) from error
    rows, problems = [], []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(parse_json(line))
        except ValueError as error:
            problem = f"is no JSON in line {number} ({error})"
            problems.append(Problem(field, path, problem, remedy))
    if problems:
        raise DataError(*problems[:_MOST_TOLD])
    return rows


class PromptSet:
    """Prompts of a run, encoded, in another order in each epoch.

    Args:
        field: Name of the prompts in errors.
        rows: Records with a `prompt`, a text, or `messages`, a conversation; further
            fields are for the reward functions.
        prompts: Tokenizer and chat template.
        most: Most tokens of a prompt.
        seed: Seed of the order; None takes the order of the rows.

    Raises:
        DataError: There is no record, or records are no prompts; the first are named.
        ConfigError: Prompts that are too long.
    """

    def __init__(
        self,
        field: str,
        rows: Iterable[Mapping[str, Any]],
        prompts: Prompts,
        *,
        most: int,
        seed: int | None,
    ):
        rows = [*rows]
        _check_rows(field, rows)
        self._all = [_encoded(row, prompts) for row in rows]
        self._order = None if seed is None else Sampler(seed, len(rows), 1)
        _check_lengths(field, self._all, most)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt.ids) for prompt in self._all)

    @property
    def digest(self) -> str:
        """Checksum of all prompts and fields, compared when a run resumes."""
        checksum = 0
        for prompt in self._all:
            record = [prompt.ids.tolist(), prompt.row]
            checksum = zlib.crc32(json.dumps(record, sort_keys=True).encode(), checksum)
        return f"{checksum:08x}"

    def at(self, number: int) -> Prompt:
        """Returns the prompt of a place in the order of prompts, which has no end."""
        if self._order is None:
            return self._all[number % len(self._all)]
        return self._all[int(self._order.indices(number)[0])]


def _check_rows(field: str, rows: Sequence[Any]) -> None:
    """Refuses an empty set, and records without one prompt."""
    if not rows:
        raise DataError(Problem(field, "[]", "has no prompt", "give one or more"))
    problems = []
    for number, row in enumerate(rows, 1):
        named = [x for x in _GIVEN if isinstance(row, Mapping) and row.get(x)]
        if len(named) != 1:
            problem = f"has {len(named)} of 'prompt' and 'messages' in record {number}"
            problems.append(Problem(field, str(row)[:40], problem, "give one of them"))
        elif "completion" in row:
            problem = f"is the text that rewards read, in record {number}"
            problems.append(Problem(field, "completion", problem, "rename the field"))
    if problems:
        raise DataError(*problems[:_MOST_TOLD])


def _check_lengths(field: str, given: Sequence[Prompt], most: int) -> None:
    """Refuses prompts that leave a text too few tokens of a row."""
    wrong = [(n, len(x.ids)) for n, x in enumerate(given, 1) if len(x.ids) > most]
    if wrong:
        number, size = wrong[0]
        problem = f"has {size} tokens in record {number}, and data.length less "
        problem += f"rl.rollout.max_new_tokens leaves {most}"
        more = f" ({len(wrong)} prompts are too long)"
        remedy = "shorten the prompt, or raise data.length"
        raise ConfigError(Problem(field, "given", problem + more, remedy))


def _encoded(row: Mapping[str, Any], prompts: Prompts) -> Prompt:
    """Encodes the prompt of a record."""
    given = row.get("prompt") or row["messages"]
    rest = {name: x for name, x in row.items() if name not in _GIVEN}
    return Prompt(given, prompts.encode(given), rest)
