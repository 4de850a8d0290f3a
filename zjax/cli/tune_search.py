"""Candidates of `zjax tune`: chosen, measured in child processes, and recorded."""

import dataclasses
import hashlib
import json
import math
import os
import pathlib
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax

from zjax.config.load import load_config
from zjax.errors import BenchError, Problem, ZjaxError
from zjax.estimate.candidates import Candidate
from zjax.estimate.mesh import this_machine
from zjax.estimate.trial import Machine
from zjax.files import append_line, parse_json, read_lines
from zjax.processes.programs import result_line, run_program
from zjax.processes.start import die_with_parent
from zjax.run.bench import measure
from zjax.run.compiler import simulation

WARM_UP_STEPS = 2
TIMED_ROUNDS = 3
TRIAL_SECONDS = 1_800
"""Seconds after which a trial has failed."""
_MAX_REASON = 60
"""Number of characters of an error that a failure quotes."""


def main() -> None:
    """Prints facts about the devices, or a measurement, as a line for the parent."""
    parent, simulated, *paths = sys.argv[1:]
    die_with_parent(int(parent))  # an orphaned trial would hold the devices
    for option, value in simulation(int(simulated)).items():
        jax.config.update(option, value)
    if not paths:
        devices = jax.devices()
        machine = dataclasses.asdict(this_machine(devices))
        size = machine["device_bytes"]
        # JSON has no infinity.
        machine["device_bytes"] = size if math.isfinite(size) else None
        print(result_line({"kind": devices[0].device_kind, **machine}))
        return
    config = load_config(paths[0])
    found = measure(config, num_warm_up=WARM_UP_STEPS, num_rounds=TIMED_ROUNDS)
    print(result_line(dataclasses.asdict(found)))


@dataclasses.dataclass(frozen=True)
class Facts:
    """Devices that trials run on."""

    kind: str
    num_devices: int
    devices_per_host: int
    device_bytes: int | float | None

    def machine(self, device_gb: int | float = 0) -> Machine:
        """Machine to predict for; `device_gb` above 0 replaces the device memory."""
        known = device_gb * 1e9 or self.device_bytes or math.inf
        return Machine(self.num_devices, self.devices_per_host, known)


class Runner:
    """Runs trials in child processes.

    Args:
        simulated_devices: Number of CPU devices to simulate; 0 for real devices.
    """

    def __init__(self, log: pathlib.Path, simulated_devices: int = 0):
        self._log, self._simulated = log, simulated_devices

    def facts(self) -> Facts:
        """Describes the devices, as a child process sees them."""
        found, failure = self._run()
        if failure:
            problem, remedy = f"fails: {failure}", "see `zjax report`"
            raise BenchError(Problem("devices", "jax.devices()", problem, remedy))
        return Facts(**found)

    def measure(self, settings: str) -> tuple[dict[str, Any], str]:
        """Measures a few steps of a Gin config; returns the result, or the failure."""
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "trial.gin"
            path.write_text(settings)
            return self._run(str(path))

    def _run(self, *words: str) -> tuple[dict[str, Any], str]:
        """Runs this module in a child process; returns the result, or the failure."""
        command = [sys.executable, "-m", "zjax.cli.tune_search", str(os.getpid())]
        command.append(str(self._simulated))
        outcome = run_program(
            [*command, *words],
            os.environ,
            self._log,
            title=" ".join(words) or "devices",
            timeout_seconds=TRIAL_SECONDS,
        )
        failure = outcome.failure
        said = re.findall(r"^zjax: (.*)$", outcome.output, re.MULTILINE)
        # A zjax error of the child explains more than the exit code.
        if failure.startswith("exit code") and said:
            failure = said[-1][:_MAX_REASON]
        return outcome.result, failure


if __name__ == "__main__":
    try:
        main()
    except ZjaxError as error:
        print(f"zjax: {error}")
        sys.exit(2)


OUT_OF_MEMORY = "out of memory"
_PLAUSIBLE = 1.15
"""Ratio of predicted seconds to the best, above which candidates are not tried."""
_AFTER_FAILURE = 0.8
"""Fraction of predicted bytes that ran out of memory, up to which candidates fit."""
_LEAST_SCALE, _MOST_SCALE = 0.7, 1.3


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a trial of a candidate.

    Args:
        tokens_per_second: Tokens per second and device; 0 if the trial failed.
        peak_bytes: Measured bytes per device; 0 if unknown.
        failure: Reason of a failure; empty if the trial succeeded.
    """

    candidate: Candidate
    predicted_bytes: int | float
    tokens_per_second: int | float = 0.0
    peak_bytes: int | float = 0.0
    failure: str = ""


@runtime_checkable
class Predictions(Protocol):
    """Interface of a `Predictor` to the search."""

    @property
    def usable_bytes(self) -> int | float:
        """Bytes of a device that a step may take."""
        ...

    def obstacle(self, candidate: Candidate) -> str:
        """Reason why a candidate cannot work; empty if it can."""
        ...

    def num_bytes(self, candidate: Candidate) -> int | float:
        """Predicted bytes per device of a step."""
        ...

    def seconds(self, candidate: Candidate) -> float:
        """Predicted seconds of a step, to rank candidates by."""
        ...


def next_candidate(
    ranked: Sequence[Candidate],
    given: Candidate | None,
    outcomes: Sequence[Outcome],
    predictions: Predictions,
) -> Candidate | None:
    """Chooses the candidate of the next trial; None if no candidate promises more.

    First the given settings, if they fit; then the best by prediction, until a trial
    works; then neighbours of the fastest in one choice. `ranked` is sorted by predicted
    seconds. Out-of-memory failures and measured peaks correct the predicted bytes that
    fit.
    """
    tried = {outcome.candidate for outcome in outcomes}
    limit = _limit(outcomes, predictions.usable_bytes)

    def fits(candidate: Candidate) -> bool:
        if candidate in tried or predictions.obstacle(candidate):
            return False
        return predictions.num_bytes(candidate) <= limit

    if given and fits(given):
        return given
    best = fastest(outcomes)
    # The given settings may be slow: the best prediction is tried, too.
    if not best or all(x.candidate == given for x in outcomes if not x.failure):
        return next(filter(fits, ranked), None)
    longest = _PLAUSIBLE * predictions.seconds(best.candidate)
    near = (
        candidate
        for candidate in ranked
        if _is_near(candidate, best.candidate, ranked)
        and predictions.seconds(candidate) <= longest
    )
    return next(filter(fits, near), None)


def fastest(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Trial with the most tokens per second; None if all failed."""
    done = [outcome for outcome in outcomes if not outcome.failure]
    return max(done, key=lambda x: x.tokens_per_second, default=None)


def _limit(outcomes: Sequence[Outcome], usable: int | float) -> float:
    """Predicted bytes up to which a candidate counts as fitting."""
    ratios = [x.peak_bytes / x.predicted_bytes for x in outcomes if x.peak_bytes]
    scale = statistics.median(ratios) if ratios else 1.0
    # Bounds keep one odd measurement from moving the limit far.
    limit = usable / min(max(scale, _LEAST_SCALE), _MOST_SCALE)
    failed = [x.predicted_bytes for x in outcomes if x.failure == OUT_OF_MEMORY]
    return min([limit, *(_AFTER_FAILURE * size for size in failed)])


def _is_near(one: Candidate, best: Candidate, ranked: Sequence[Candidate]) -> bool:
    """Whether two candidates differ in one choice; microbatch sizes are adjacent."""
    values = dataclasses.asdict(one), dataclasses.asdict(best)
    changed = [name for name in values[0] if values[0][name] != values[1][name]]
    if changed != ["microbatch_size"]:
        return len(changed) == 1
    sizes = sorted(
        {x.microbatch_size for x in ranked if _differs_in_size(x, best)}
        | {best.microbatch_size}
    )
    here = sizes.index(best.microbatch_size)
    return one.microbatch_size in sizes[max(0, here - 1) : here + 2]


def _differs_in_size(one: Candidate, other: Candidate) -> bool:
    """Whether two candidates are equal up to the microbatch size."""
    return dataclasses.replace(one, microbatch_size=other.microbatch_size) == other


class Records:
    """Recorded trials of one run on one kind of machine."""

    def __init__(self, path: pathlib.Path, settings: str, facts: Facts):
        text = f"{settings}{facts.kind} x {facts.num_devices}"
        self._path, self._key = path, hashlib.sha256(text.encode()).hexdigest()[:16]

    def read(self) -> list[Outcome]:
        """Reads the trials in order; warns of a line that was cut off."""
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
            ) from error

    def append(self, outcome: Outcome) -> None:
        """Appends a trial to the file."""
        row = {"run": self._key, **dataclasses.asdict(outcome)}
        append_line(self._path, json.dumps(row))


def _outcome(row: dict) -> Outcome:
    """Outcome from a row of the file."""
    return Outcome(candidate=Candidate(**row.pop("candidate")), **row)
