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
from zjax.rl.rollouts import row_problem

MAX_BYTES = 1 << 30
"""Most bytes of a file of prompts."""
_MOST_TOLD = 3
"""Most lines at fault that an error names."""
_MAX_SHOWN = 40
"""Most characters of a record that an error shows."""
_GIVEN = ("prompt", "messages")
_MARK = "\ufeff"
"""Byte order mark, with which some editors begin a file of UTF-8."""


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
    """Reads the records of JSON Lines, without blank lines and a byte order mark.

    One error names the lines at fault.
    """
    remedy = "give JSON Lines with 'prompt' or 'messages' in each"
    try:
        text = read_text(pathlib.Path(path), MAX_BYTES)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        problem = f"cannot be read ({why})"
        raise DataError(Problem(field, path, problem, remedy)) from error
    rows, problems = [], []
    for number, line in enumerate(io.StringIO(text.removeprefix(_MARK)), 1):
        if line.isspace():
            continue
        try:
            rows.append(parse_json(line))
        except ValueError as error:
            why = getattr(error, "msg", error)  # without a place in the line
            problem = f"is no JSON in line {number} ({why})"
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
        ConfigError: Prompts that are too long, or conversations without a template.
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
        _check_template(field, rows, prompts)
        self._all = _encode(field, rows, prompts)
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
        problem, remedy = _find_fault(row)
        if problem:
            problem += f" in record {number}"
            problems.append(Problem(field, str(row)[:_MAX_SHOWN], problem, remedy))
    if problems:
        raise DataError(*problems[:_MOST_TOLD])


def _find_fault(row: Any) -> tuple[str, str]:
    """Tells why a record is no prompt, and the remedy; an empty text if it is one."""
    named = [x for x in _GIVEN if isinstance(row, Mapping) and row.get(x) is not None]
    if len(named) != 1:
        return f"has {len(named)} of 'prompt' and 'messages'", "give one of them"
    given, is_text = row[named[0]], named == ["prompt"]
    if is_text and not (isinstance(given, str) and given):
        return "has no text as 'prompt'", "give a text, or a conversation as 'messages'"
    if not is_text and not _is_talk(given):
        return "has no list as 'messages'", 'write [{"role": "user", "content": "..."}]'
    problem = row_problem({name: x for name, x in row.items() if name != "prompt"})
    return problem, "name the field otherwise, or make it JSON"


def _is_talk(given: Any) -> bool:
    """Whether a value is a list of mappings, which are to be messages."""
    is_list = isinstance(given, list | tuple) and len(given) > 0
    return is_list and all(isinstance(each, Mapping) for each in given)


def _check_template(
    field: str, rows: Sequence[Mapping[str, Any]], prompts: Prompts
) -> None:
    """Refuses conversations if the data has no chat template."""
    if all(row.get("messages") is None for row in rows):
        return
    try:
        _ = prompts.chat
    except (ConfigError, DataError) as error:
        remedy = "set data.path to data that `zjax data prepare --chat` made"
        problem = error.problems[0].problem
        raise ConfigError(Problem(field, "messages", problem, remedy)) from error


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


def _encode(
    field: str, rows: Sequence[Mapping[str, Any]], prompts: Prompts
) -> list[Prompt]:
    """Encodes the prompts of records; one error names the first that cannot be."""
    encoded, problems = [], []
    for number, row in enumerate(rows, 1):
        given = row.get("prompt") or row["messages"]
        rest = {name: x for name, x in row.items() if name not in _GIVEN}
        try:
            encoded.append(Prompt(given, prompts.encode(given), rest))
        except (ConfigError, DataError) as error:
            problem, shown = error.problems[0], str(given)[:_MAX_SHOWN]
            text = f"{problem.problem} in record {number}"
            problems.append(Problem(field, shown, text, problem.remedy))
    if problems:
        raise DataError(*problems[:_MOST_TOLD])
    return encoded
