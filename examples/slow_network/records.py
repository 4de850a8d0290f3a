"""Records of the runs of a directory, one JSONL file per method, and what they show."""

import contextlib
import dataclasses
import itertools
import json
import pathlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import network

COUNTERS = pathlib.Path("/proc/self/net/dev")
ROUNDS = 5
"""Parts of a run whose speeds are compared."""
TOLERANCE = 0.005
"""How much a loss may be above the one to reach, as a fraction: methods that follow
each other closely end above or below it by chance."""


class Recorder:
    """Writes the steps of one process; its clock leaves out all that is no step.

    Steps that compile, such as the first, do not count.

    Args:
        path: New file to write; None records nothing, as in all but the first process.
        header: What was measured.
    """

    def __init__(self, path: pathlib.Path | None, header: Mapping[str, Any]):
        self._path = path
        self._seconds = 0.0
        self._write(header)

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[dict[str, Any]]:
        """Times a step, which adds to the yielded record its `loss`, and `compiles`."""
        found: dict[str, Any] = {"step": number, "compiles": number == 1}
        sent, start = network.sent_bytes(COUNTERS.read_text()), time.perf_counter()
        yield found
        seconds = time.perf_counter() - start
        self._seconds += 0 if found["compiles"] else seconds
        sent = network.sent_bytes(COUNTERS.read_text()) - sent
        times = {"step_seconds": seconds, "seconds": self._seconds}
        self._write(found | times | {"sent_bytes": sent})

    def evaluation(self, number: int, loss: float) -> None:
        """Adds the loss on held-out text after a step."""
        self._write({"step": number, "seconds": self._seconds, "eval_loss": loss})

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a") as lines:
                lines.write(json.dumps(dict(record)) + "\n")


@dataclasses.dataclass(frozen=True)
class Records:
    """One run.

    Args:
        method: Name of the method.
        setup: Link, processes and settings; equal in all runs of a directory.
        steps: Records of the steps that did not compile.
        evaluations: Records of held-out losses.
    """

    method: str
    setup: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]

    @property
    def step_seconds(self) -> list[float]:
        """Seconds of each step."""
        return [step["step_seconds"] for step in self.steps]

    @property
    def final_loss(self) -> float:
        """Loss on held-out text at the end."""
        return self.evaluations[-1]["eval_loss"]

    def seconds_to(self, loss: float) -> float | None:
        """Seconds until the held-out loss was so low, between evaluations by a line."""
        pairs = itertools.pairwise([self.evaluations[0], *self.evaluations])
        for before, after in pairs:
            if after["eval_loss"] <= loss:
                return _crossing(before, after, loss)
        return None


def read(path: pathlib.Path) -> Records:
    """Reads the file of one run."""
    header, *lines = map(json.loads, path.read_text().splitlines())
    return Records(
        **header,
        steps=[x for x in lines if not x.get("compiles", True)],
        evaluations=[x for x in lines if "eval_loss" in x],
    )


def read_all(directory: pathlib.Path, setup: Mapping[str, Any]) -> dict[str, Records]:
    """All finished runs of a directory, in the order in which they were measured.

    Raises:
        SystemExit: One was measured with another setup.
    """
    paths = sorted(directory.glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
    runs = {path.stem: read(path) for path in paths}
    for name, run in runs.items():
        if run.setup != setup:
            different = [key for key in setup if setup[key] != run.setup.get(key)]
            raise SystemExit(
                f"directory={directory} has {name} of another {', '.join(different)}; "
                "use another directory"
            )
    return runs


def summarize(run: Records, alone: Records, reference: Records) -> dict[str, Any]:
    """The numbers of one run.

    Args:
        run: The run.
        alone: Steps without communication.
        reference: The run whose final loss is to be reached, up to `TOLERANCE`.

    Returns:
        `steps_per_second` (spread over parts of the run), `mean_steps_per_second`,
        `sent_bytes_per_step` of the first node, `link_share` (of what its link could
        send), `communication_share`, `final_loss`, `seconds_to_loss` (None if it was
        not reached) and `runs_per_hour` to that loss.
    """
    seconds, total = run.step_seconds, sum(run.step_seconds)
    own = statistics.median(alone.step_seconds) * len(seconds)
    sent = sum(step["sent_bytes"] for step in run.steps)
    link = network.Link(run.setup["megabits"])
    reached = run.seconds_to(reference.final_loss * (1 + TOLERANCE))
    return {
        "steps_per_second": _spread_of_speeds(seconds),
        "mean_steps_per_second": len(seconds) / total,
        "sent_bytes_per_step": sent / len(seconds),
        "link_share": sent / (total * link.bytes_per_second),
        "communication_share": max(0.0, 1 - own / total),
        "final_loss": run.final_loss,
        "seconds_to_loss": reached,
        "runs_per_hour": 3600 / reached if reached else 0.0,
    }


def _spread_of_speeds(seconds: Sequence[float]) -> dict[str, float]:
    size = -(-len(seconds) // ROUNDS)
    parts = [seconds[i : i + size] for i in range(0, len(seconds), size)]
    speeds = [len(part) / sum(part) for part in parts]
    return {
        "median": statistics.median(speeds),
        "min": min(speeds),
        "max": max(speeds),
        "n": len(speeds),
    }


def _crossing(
    before: Mapping[str, Any], after: Mapping[str, Any], loss: float
) -> float:
    fall = before["eval_loss"] - after["eval_loss"]
    share = (before["eval_loss"] - loss) / fall if fall else 1.0
    return before["seconds"] + share * (after["seconds"] - before["seconds"])
