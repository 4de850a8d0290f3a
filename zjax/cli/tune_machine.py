"""Trials on the devices of this machine, each in a process of its own."""

import dataclasses
import math
import os
import pathlib
import re
import sys
import tempfile
from typing import Any

import jax

from zjax.cli.bench import measure
from zjax.config.load import load_config
from zjax.errors import BenchError, Problem, ZjaxError
from zjax.estimate.mesh import this_machine
from zjax.estimate.trial import Machine
from zjax.processes.programs import result_line, run_program
from zjax.processes.start import die_with_parent
from zjax.run.compiler import simulation
from zjax.settings import schema
from zjax.settings.describe import describe_config

WARM_UP_STEPS = 2
TIMED_ROUNDS = 3


def main() -> None:
    """Prints a result for the process that started this one."""
    parent, simulated, *paths = sys.argv[1:]
    die_with_parent(int(parent))  # a trial must not hold the devices on its own
    for option, value in simulation(int(simulated)).items():
        jax.config.update(option, value)
    if not paths:
        devices = jax.devices()
        machine = dataclasses.asdict(this_machine(devices))
        size = machine["device_bytes"]
        machine["device_bytes"] = size if math.isfinite(size) else None
        print(result_line({"kind": devices[0].device_kind, **machine}))
        return
    config = load_config(paths[0])
    found = measure(config, num_warm_up=WARM_UP_STEPS, num_rounds=TIMED_ROUNDS)
    print(result_line(dataclasses.asdict(found)))


if __name__ == "__main__":
    try:
        main()
    except ZjaxError as error:
        print(f"zjax: {error}")
        sys.exit(2)


TRIAL_SECONDS = 1_800
"""A trial that takes longer has failed."""
_MAX_REASON = 60
"""Characters of an error that a failure quotes."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """The devices that trials run on.

    Args:
        kind: Their name.
        num_devices: Devices of this machine.
        devices_per_host: The same, as one process sees them.
        device_bytes: Memory of one; None where it is not known.
    """

    kind: str
    num_devices: int
    devices_per_host: int
    device_bytes: int | float | None

    def machine(self, device_gb: int | float = 0) -> Machine:
        """The machine to predict for; `device_gb` above 0 replaces its memory."""
        known = device_gb * 1e9 or self.device_bytes or math.inf
        return Machine(self.num_devices, self.devices_per_host, known)


class Runner:
    """Runs trials.

    Args:
        log: File to which the output of all trials is appended.
        simulated_devices: CPU devices to simulate; 0 for the real ones.
    """

    def __init__(self, log: pathlib.Path, simulated_devices: int = 0):
        self._log, self._simulated = log, simulated_devices

    def facts(self) -> Facts:
        """Finds the devices."""
        found, failure = self._run()
        if failure:
            problem, remedy = f"fails: {failure}", "see `zjax report`"
            raise BenchError(Problem("devices", "jax.devices()", problem, remedy))
        return Facts(**found)

    def measure(self, config: schema.Config) -> tuple[dict[str, Any], str]:
        """Takes a few steps; returns the measurement, or why there is none."""
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "trial.gin"
            path.write_text(describe_config(config))
            return self._run(str(path))

    def _run(self, *words: str) -> tuple[dict[str, Any], str]:
        command = [sys.executable, "-m", "zjax.cli.tune_machine", str(os.getpid())]
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
        if failure.startswith("exit code") and said:
            failure = said[-1][:_MAX_REASON]
        return outcome.result, failure
