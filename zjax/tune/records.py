"""The trials of a run, in a file that a second `zjax tune` goes on from."""

import dataclasses
import hashlib
import json
import pathlib

from zjax.config import schema
from zjax.config.describe import describe_config
from zjax.errors import BenchError, Problem
from zjax.reading import append_line, parse_json, read_lines
from zjax.tune.machine import Facts
from zjax.tune.search import Outcome
from zjax.tune.space import Candidate


class Records:
    """Trials of one run on one kind of machine.

    Args:
        path: A file of JSON lines, which also holds trials of other runs.
        config: The run of `with_batch`.
        facts: The devices.
    """

    def __init__(self, path: pathlib.Path, config: schema.Config, facts: Facts):
        text = f"{describe_config(config)}{facts.kind} x {facts.num_devices}"
        self._path, self._key = path, hashlib.sha256(text.encode()).hexdigest()[:16]

    def read(self) -> list[Outcome]:
        """The trials so far, in order; warns of one whose line was cut off.

        Raises:
            BenchError: The file holds something else.
        """
        if not self._path.exists():
            return []
        try:
            rows = map(parse_json, read_lines(self._path))
            return [_outcome(row) for row in rows if row.pop("run") == self._key]
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            problem = f"is not a list of trials ({type(error).__name__}: {error})"
            remedy = "remove it to begin anew"
            raise BenchError(
                Problem("records", str(self._path), problem, remedy)
            ) from (error)

    def append(self, outcome: Outcome) -> None:
        """Adds a trial."""
        row = {"run": self._key, **dataclasses.asdict(outcome)}
        append_line(self._path, json.dumps(row))


def _outcome(row: dict) -> Outcome:
    return Outcome(candidate=Candidate(**row.pop("candidate")), **row)
