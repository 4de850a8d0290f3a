"""Trials of `zjax tune`: measured in child processes, and recorded."""

import dataclasses
import hashlib
import json
import math
import os
import pathlib
import re
import sys
import tempfile
from typing import Any

import jax

from zjax.config.load import load_config
from zjax.errors import BenchError, Problem, ZjaxError
from zjax.estimate.candidates import Candidate
from zjax.estimate.mesh import this_machine
from zjax.estimate.search import Outcome
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


if __name__ == "__main__":
    try:
        main()
    except ZjaxError as error:
        print(f"zjax: {error}")
        sys.exit(2)
