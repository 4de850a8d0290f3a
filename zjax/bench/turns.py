"""Runs the programs of a contest one after another and records each."""

import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import pathlib
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

from zjax.bench.contest import Contestant
from zjax.errors import BenchError, Problem
from zjax.reading import MAX_INDEX_BYTES, append_line, parse_json, read_lines

_PROBE = """import jax, json
devices = jax.devices()
print(json.dumps([len(devices), devices[0].device_kind]))"""
_STOP_SECONDS = 20
"""How long a stopped program may take to end its own children."""
_TAIL_LINES = 15
_OUT_OF_MEMORY = re.compile("out of memory|RESOURCE_EXHAUSTED", re.IGNORECASE)


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
    """Finds the devices in a subprocess, so that this process holds none.

    Raises:
        BenchError: JAX finds no device.
    """
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
    """Runs programs in turn; logs their output and appends a record for each.

    Args:
        contestants: Programs in order.
        machine: This machine.
        stem: Path without suffix: `<stem>.log` and `<stem>.jsonl` are appended to.
        environment: Environment of the programs, besides their own variables.

    Yields:
        One record per contestant, already on disk.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    log, records = stem.with_suffix(".log"), stem.with_suffix(".jsonl")
    for contestant in contestants:
        words = contestant.words(sys.executable, machine.num_devices)
        environ = {**environment, **contestant.environment}
        print(f"{contestant.name}: {' '.join(contestant.command)}", flush=True)
        start = time.monotonic()
        with log.open("a+", errors="replace") as output:
            output.write(f"\n=== {contestant.name}: {' '.join(words)}\n")
            output.flush()
            first = output.tell()
            failure = run_program(words, environ, output, contestant.timeout_seconds)
            output.seek(first)
            text = output.read()
        result, failure = judge(text, failure)
        date = datetime.date.today().isoformat()
        record = Record(contestant.name, machine, date, result, failure)
        append_line(records, json.dumps(dataclasses.asdict(record)))
        print(f"  {failure or 'done'}, {time.monotonic() - start:.0f} s", flush=True)
        if failure:
            tail = text.splitlines()[-_TAIL_LINES:]
            print("\n".join(f"  | {line[:200]}" for line in tail), flush=True)
        yield record


def read_records(paths: Iterable[str | os.PathLike[str]]) -> list[Record]:
    """Reads record files of one contest; the last record of each contestant counts.

    Raises:
        BenchError: A file is not of this kind, or the records are from several machines
            and cannot be compared.
    """
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
            remedy = "give a .jsonl file that `zjax bench --contest` wrote"
            raise BenchError(Problem("records", path, problem, remedy)) from error
    machines = {record.machine for record in records.values()}
    if len(machines) != 1:
        problem = f"come from {len(machines)} machines"
        remedy = "give records of one machine; others cannot be compared"
        raise BenchError(Problem("records", paths, problem, remedy))
    return list(records.values())


def run_program(
    words: Sequence[str],
    environ: Mapping[str, str],
    output: IO[str],
    timeout: int | float,
) -> str:
    """Runs a program; returns why it failed, or an empty string."""
    with _exit_on_sigterm():
        try:
            program = subprocess.Popen(
                words,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        except OSError as error:
            return f"could not start: {error.strerror}"
        try:
            code = program.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"ran past {timeout:g} s"
        finally:
            _stop(program)
    return f"exit code {code}" if code else ""


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Lets SIGTERM unwind the stack, so that no program is left running."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(program: subprocess.Popen) -> None:
    """Ends a program and its children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(_STOP_SECONDS)


def judge(text: str, failure: str) -> tuple[dict[str, Any], str]:
    """The result in a program's output, and why there is none."""
    if failure:
        return {}, "out of memory" if _OUT_OF_MEMORY.search(text) else failure
    lines = re.findall(r"^RESULT (.*)$", text, re.MULTILINE)
    if len(lines) != 1:
        return {}, f"printed {len(lines)} RESULT lines"
    try:
        result = json.loads(lines[0])
    except ValueError:
        result = None
    if not isinstance(result, dict):
        return {}, "printed a RESULT that is no JSON object"
    return result, ""


def _identity() -> str:
    """A digest of host and GPUs; results are published, host names are not."""
    text = platform.node()
    if shutil.which("nvidia-smi"):
        gpus = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
        text += gpus.stdout
    return hashlib.sha256(text.encode()).hexdigest()[:12]
