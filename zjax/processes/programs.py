"""Runs programs that print one line `RESULT {json}`, and reads the results."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO, Any

_STOP_SECONDS = 20
"""Seconds that a stopped program may take to end child processes."""
_OUT_OF_MEMORY = re.compile("out of memory|RESOURCE_EXHAUSTED", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Output of a program with a result, or with the failure that prevented one."""

    result: dict[str, Any]
    failure: str
    output: str


def result_line(values: Mapping[str, Any]) -> str:
    """Formats the line `RESULT {json}` that `run_program` reads.

    Args:
        values: JSON values by name; `dataclasses.asdict` of a `Measurement`.

    Example:
        >>> result_line({"loss": 2.5})
        'RESULT {"loss": 2.5}'
    """
    return f"RESULT {json.dumps(dict(values), allow_nan=False)}"


def run_program(
    words: Sequence[str],
    environment: Mapping[str, str],
    log: pathlib.Path,
    *,
    title: str,
    timeout_seconds: int | float,
) -> Outcome:
    """Runs a program, appends title and output to a log, and reads the result."""
    with log.open("a+", errors="replace") as output:
        output.write(f"\n=== {title}\n")
        output.flush()  # before the program writes to this file
        first = output.tell()
        failure = _run(words, environment, output, timeout_seconds)
        output.seek(first)
        text = output.read()
    return Outcome(*find_result(text, failure), text)


def find_result(text: str, failure: str) -> tuple[dict[str, Any], str]:
    """Finds the result in a program's output, or says why there is none."""
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


def _run(
    words: Sequence[str],
    environment: Mapping[str, str],
    output: IO[str],
    timeout_seconds: int | float,
) -> str:
    """Runs a program; returns the reason of a failure, or an empty string."""
    try:
        program = subprocess.Popen(
            words,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,  # lets _stop end the children, too
        )
    except OSError as error:
        return f"could not start: {error.strerror}"
    try:
        code = program.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        return f"ran past {timeout_seconds:g} s"
    finally:
        # Also after success: a child may have outlived the program.
        _stop(program)
    return f"exit code {code}" if code else ""


def _stop(program: subprocess.Popen) -> None:
    """Ends a program and all children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(_STOP_SECONDS)
