"""Runs the programs of a contest one after another and records each."""

import dataclasses
import datetime
import hashlib
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from contests.contest import Contestant
from zjax.errors import BenchError, Problem
from zjax.files import MAX_INDEX_BYTES, append_line, parse_json, read_lines
from zjax.processes.programs import run_program

SPEED, PEAK = "tokens_per_second_per_device", "peak_bytes"
"""Names of speed and peak memory in the results of programs that train."""
_PROBE = """import jax, json
devices = jax.devices()
print(json.dumps([len(devices), devices[0].device_kind]))"""
_TAIL_LINES = 15
"""Lines of output shown of a program that failed."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where a contest runs; `identity` is equal only for records from one machine."""

    identity: str
    device: str
    num_devices: int


@dataclasses.dataclass(frozen=True)
class Record:
    """The outcome of one contestant.

    Args:
        name: Name of the contestant.
        machine: Machine it ran on.
        date: Date, YYYY-MM-DD.
        result: Printed result; empty if it failed.
        failure: Why it failed; empty if it did not.
    """

    name: str
    machine: Machine
    date: str
    result: Mapping[str, Any]
    failure: str


def find_machine(environment: Mapping[str, str]) -> Machine:
    """Finds the devices in a subprocess, so that this process holds none."""
    command = [sys.executable, "-c", _PROBE]
    probe = subprocess.run(
        command, env=dict(environment), capture_output=True, text=True
    )
    if probe.returncode:
        problem = f"fails: {probe.stderr.strip().splitlines()[-1]}"
        remedy = "see `zjax report`"
        raise BenchError(Problem("devices", "jax.devices()", problem, remedy))
    num_devices, kind = json.loads(probe.stdout.splitlines()[-1])
    return Machine(_identity(), kind, num_devices)


def take_turns(
    contestants: Iterable[Contestant],
    machine: Machine,
    stem: pathlib.Path,
    environment: Mapping[str, str],
) -> Iterator[Record]:
    """Runs programs in turn, and yields a record of each once it is on disk.

    `<stem>.log` gets their output and `<stem>.jsonl` their records.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    for contestant in contestants:
        words = contestant.words(sys.executable, machine.num_devices)
        print(f"{contestant.name}: {' '.join(contestant.command)}", flush=True)
        start = time.monotonic()
        found = run_program(
            words,
            {**environment, **contestant.environment},
            stem.with_suffix(".log"),
            title=f"{contestant.name}: {' '.join(words)}",
            timeout_seconds=contestant.timeout_seconds,
        )
        date = datetime.date.today().isoformat()
        record = Record(contestant.name, machine, date, found.result, found.failure)
        append_line(stem.with_suffix(".jsonl"), json.dumps(dataclasses.asdict(record)))
        seconds = time.monotonic() - start
        print(f"  {found.failure or 'done'}, {seconds:.0f} s", flush=True)
        if found.failure:
            tail = found.output.splitlines()[-_TAIL_LINES:]
            print("\n".join(f"  | {line[:200]}" for line in tail), flush=True)
        yield record


def read_records(paths: Iterable[str | os.PathLike[str]]) -> list[Record]:
    """Reads the last record of each contestant from files of one machine."""
    paths = [str(path) for path in paths]
    records: dict[str, Record] = {}
    for path in paths:
        try:
            for line in read_lines(path, MAX_INDEX_BYTES):
                given = parse_json(line)
                machine = Machine(**given.pop("machine"))
                record = Record(machine=machine, **given)
                records[record.name] = record
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            problem = f"is not a list of records ({type(error).__name__}: {error})"
            remedy = "give a .jsonl file that a contest wrote"
            raise BenchError(Problem("records", path, problem, remedy)) from error
    machines = {record.machine for record in records.values()}
    if len(machines) != 1:
        problem = f"come from {len(machines)} machines"
        remedy = "give records of one machine; others cannot be compared"
        raise BenchError(Problem("records", paths, problem, remedy))
    return list(records.values())


def _identity() -> str:
    """A digest of host and GPUs; results are published, host names are not."""
    text = platform.node()
    if shutil.which("nvidia-smi"):
        gpus = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
        text += gpus.stdout
    return hashlib.sha256(text.encode()).hexdigest()[:12]
