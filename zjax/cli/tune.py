"""Command `zjax tune`: predicts, measures trials, and writes the fastest config."""

import pathlib
import shlex
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from zjax.cli.tune_search import Facts, Records, Runner
from zjax.config.check import uncounted_problems
from zjax.errors import ConfigError, Problem
from zjax.estimate.candidates import (
    Candidate,
    Predictor,
    candidates,
    given_candidate,
    with_batch,
)
from zjax.estimate.search import (
    Outcome,
    describe_candidate,
    describe_outcomes,
    search,
)
from zjax.files import local_path
from zjax.observe.history import check_directory
from zjax.settings import schema
from zjax.settings.describe import describe_config

MAX_TRIALS = 8


@runtime_checkable
class Trials(Protocol):
    """Interface of a `Runner`: finds devices and measures trials."""

    def facts(self) -> Facts:
        """Describes the devices."""
        ...

    def measure(self, settings: str) -> tuple[dict[str, Any], str]:
        """Measures a few steps of a Gin config; returns the result, or the failure."""
        ...


def tune(
    config: schema.Config,
    *,
    num_trials: int = 4,
    output: str = "",
    simulated_devices: int = 0,
    device_gb: int | float = 0,
    runner: Trials | None = None,
) -> str:
    """Finds fast settings of a run by predictions and a few trials.

    Trials are recorded in `tune.jsonl` in the directory of the run, and trials of an
    earlier call with equal settings count. `config` is a run of a built-in model, whose
    data is not read; `output` a Gin file. Returns a table of the trials, the settings
    to change, and the next command.
    """
    folder = pathlib.Path(local_path("directory", config.directory))
    path = pathlib.Path(local_path("output", output or folder / "tuned.gin"))
    problems = [*uncounted_problems(config, 1), *_output_problems(path)]
    problems += _process_problems(config.processes.coordinator)
    if problems:
        raise ConfigError(*problems)
    check_directory(str(folder))
    jax.config.update("jax_platforms", "cpu")  # the trials' processes need the GPUs
    runner = runner or Runner(folder / "tune.log", simulated_devices)
    facts = runner.facts()
    machine = facts.machine(device_gb)
    given, config = given_candidate(config, machine), with_batch(config, machine)
    predictor = Predictor(config, machine, facts.kind)
    given_lines = describe_config(config)
    records = Records(folder / "tune.jsonl", given_lines, facts)
    outcomes = records.read()
    ranked = sorted(candidates(config, machine), key=predictor.seconds)
    with _Progress(num_trials, len(outcomes)) as progress:

        def measure(candidate: Candidate) -> Outcome:
            progress.begin(describe_candidate(candidate))
            found = runner.measure(describe_config(candidate.apply(config)))
            outcome = _outcome(candidate, predictor.num_bytes(candidate), *found)
            # Saved after each trial: a killed command loses no finished trial.
            records.append(outcome)
            progress.end(outcome)
            return outcome

        best = search(
            *(ranked, given, outcomes, predictor, measure),
            num_trials=num_trials,
            log="tune.log in the directory of the run",
        )
    fastest_lines = describe_config(best.candidate.apply(config))
    path.write_text(fastest_lines)
    return "\n".join(
        [
            describe_outcomes(outcomes, given),
            "",
            *_changes(given_lines, fastest_lines),
            f"wrote {path}",
            f"next: zjax train --config={shlex.quote(str(path))}",
        ]
    )


def _output_problems(path: pathlib.Path) -> Iterator[Problem]:
    """Yields a problem for an output that is not a Gin file."""
    if path.suffix != ".gin":
        problem, remedy = "is not a Gin file", "use a name that ends in .gin"
        yield Problem("--output", str(path), problem, remedy)


def _process_problems(coordinator: str) -> Iterator[Problem]:
    """Yields a problem for processes of other machines, which no trial could use."""
    if coordinator not in ("auto", "none"):
        problem, remedy = "joins other machines, and trials are of one", "use none"
        yield Problem("processes.coordinator", coordinator, problem, remedy)


def _outcome(
    candidate: Candidate, predicted: int | float, found: dict[str, Any], failure: str
) -> Outcome:
    """Outcome of a trial, from a measurement or a failure."""
    if failure:
        return Outcome(candidate, predicted, failure=failure)
    speed = found["tokens_per_second_per_device"]["median"]
    return Outcome(candidate, predicted, speed, found["peak_bytes"] or 0)


def _changes(given: str, chosen: str) -> Iterator[str]:
    """Yields settings of a chosen Gin config that differ from a given one, as flags."""
    before = _lines(given)
    for line in _lines(chosen):
        name, _, value = line.partition(" = ")
        if line not in before:
            # chr(39) is a single quote: Python 3.11 allows no backslash in an f-string.
            yield f"  --{name}={value.strip(chr(39))}"


def _lines(settings: str) -> list[str]:
    """Lines of a Gin config without comments."""
    return [line.partition("  #")[0] for line in settings.splitlines()]


class _Progress:
    """Progress on stderr: a bar on a terminal, elsewhere a line per trial."""

    def __init__(self, num_trials: int, num_done: int):
        self._console = Console(stderr=True)
        self._bar = Bar(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(
            "predicting", total=num_trials, completed=num_done
        )

    def __enter__(self) -> "_Progress":
        self._bar.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self._bar.stop()

    def begin(self, text: str) -> None:
        self._bar.update(self._task, description=text)

    def end(self, outcome: Outcome) -> None:
        speed = f"{outcome.tokens_per_second:,.0f} tokens/s per device"
        line = f"{describe_candidate(outcome.candidate)}: {outcome.failure or speed}"
        self._bar.advance(self._task)
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
