"""A contest: programs that are measured in turn, and claims about their numbers.

A contest file is a Python file whose `get_contest()` returns a `Contest`.
"""

import contextlib
import dataclasses
import os
import pathlib
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, get_args

from zjax.errors import BenchError, Problem, find_fault

Theme = Literal["speed", "memory", "offload", "sparse_attention", "parallelism"]
THEMES: dict[str, str] = {
    theme: theme.replace("_", " ").capitalize() for theme in get_args(Theme)
}
"""Headings of the pages of results by theme, in the order of the summary."""


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A program that prints one line `RESULT {json}`.

    Args:
        name: Label of its numbers.
        command: Program and arguments, run from the root of the repository; `{python}`
            stands for the interpreter and `{devices}` for the number of devices.
        kind: "zjax" or "peer".
        environment: Environment variables for this program alone.
        timeout_seconds: Time limit.
    """

    name: str
    command: tuple[str, ...]
    kind: Literal["zjax", "peer"]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    timeout_seconds: int | float = 300

    def words(self, python: str, num_devices: int) -> list[str]:
        """Fills in the placeholders of the command."""
        return [
            word.replace("{python}", python).replace("{devices}", str(num_devices))
            for word in self.command
        ]


@dataclasses.dataclass(frozen=True)
class Case:
    """A comparison of two numbers; each side enters with its best contestant.

    Args:
        ours: Names of contestants.
        peer: Names of contestants, a stated number, or a function from the number of
            devices to such a number.
        metric: Name of the number in the results: a scalar, or a mapping with `median,
            min, max, n`.
        unit: Unit of the number.
        must: Ratio that the claim requires, a minimum (a maximum where lower is
            better); None for no requirement.
        aim: Ratio that is hoped for.
        name: Name of this case within its row.
        peer_metric: Name of the peer's number, if different.
        peer_name: Label of the peer; required for a stated number.
    """

    ours: tuple[str, ...]
    peer: tuple[str, ...] | int | float | Callable[[int], float]
    metric: str
    unit: str
    must: int | float | None = None
    aim: int | float | None = None
    name: str = ""
    peer_metric: str = ""
    peer_name: str = ""

    def contestants(self) -> tuple[str, ...]:
        """Names of all contestants."""
        return self.ours + (self.peer if isinstance(self.peer, tuple) else ())


@dataclasses.dataclass(frozen=True)
class Row:
    """One claim, which becomes one result.

    Args:
        id: Lower-case letters, digits and underscores.
        claim: One sentence.
        cases: One or more comparisons.
        theme: Page on which its results appear.
        headline: The claim in a few words, for the summary; if empty, the summary names
            a result only if it missed its bar.
        higher_is_better: Whether more of the metric is better.
        notes: Remarks for the reader.
        by_devices: Whether each number of devices has its own result.
    """

    id: str
    claim: str
    cases: tuple[Case, ...]
    theme: Theme = "speed"
    headline: str = ""
    higher_is_better: bool = True
    notes: str = ""
    by_devices: bool = True

    def result_id(self, num_devices: int) -> str:
        """The id of a result: the row's id, with `_x<num_devices>` if `by_devices`."""
        return f"{self.id}_x{num_devices}" if self.by_devices else self.id

    def contestants(self) -> tuple[str, ...]:
        """Names of all contestants, each once."""
        names = [name for case in self.cases for name in case.contestants()]
        return tuple(dict.fromkeys(names))


@dataclasses.dataclass(frozen=True)
class Contest:
    """Programs to measure, in order, and claims about them."""

    title: str
    contestants: tuple[Contestant, ...]
    rows: tuple[Row, ...]


def load_contest(path: str | os.PathLike[str]) -> Contest:
    """Loads and checks a contest file, which may import its neighbours."""
    path = pathlib.Path(path)
    remedy = "give a Python file whose get_contest() returns a contests.Contest"
    if fault := find_fault(path):
        raise BenchError(Problem("contest", str(path), fault, remedy))
    with _importing_from(path.parent):
        make = runpy.run_path(str(path)).get("get_contest")
        contest = make() if make else None
    if not isinstance(contest, Contest):
        raise BenchError(Problem("contest", str(path), "gives no contest", remedy))
    problems = list(contest_problems(contest))
    if problems:
        raise BenchError(*problems)
    return contest


def contest_problems(contest: Contest) -> Iterator[Problem]:
    """Yields a problem for each name in a contest that is unknown or ambiguous."""
    names = [contestant.name for contestant in contest.contestants]
    yield from _repeated("contestants", names)
    for name in names:
        if "," in name:
            problem, remedy = "cannot be given to --only", "name it without a comma"
            yield Problem("contestant", name, problem, remedy)
    yield from _repeated("rows", [row.id for row in contest.rows])
    for row in contest.rows:
        yield from unknown("contestant", row.contestants(), names, f"rows.{row.id}")
        for case in row.cases:
            if not isinstance(case.peer, tuple) and not case.peer_name:
                problem = "has no source"
                remedy = "say in peer_name where it comes from"
                yield Problem(f"rows.{row.id}.peer", case.peer, problem, remedy)


def unknown(
    what: str, names: Iterable[str], known: Iterable[str], field: str
) -> Iterator[Problem]:
    """Yields a problem for each unknown name in `field`; `what` says what they name."""
    known = tuple(dict.fromkeys(known))
    for name in names:
        if name not in known:
            yield Problem(field, name, f"names no {what}", f"use {', '.join(known)}")


def _repeated(field: str, names: list[str]) -> Iterator[Problem]:
    """Yields a problem for each name that stands several times in `field`."""
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            problem = f"appears {names.count(name)} times"
            yield Problem(field, name, problem, "give each its own name")


@contextlib.contextmanager
def _importing_from(folder: pathlib.Path) -> Iterator[None]:
    """Lets a file import its neighbours, as a script does."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
