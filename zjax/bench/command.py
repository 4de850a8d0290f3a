"""Flags of `zjax bench` for contests."""

import os

from absl import flags

from zjax.bench.compete import Selection, compete
from zjax.compiler import simulation
from zjax.config.flags import refuse_flags, settings_given
from zjax.config.paths import local_path

CONTEST_FLAGS = ("only", "rows", "records", "output")
"""Flags that need `--contest`."""
OUTPUT = "runs/bench"


def define_contest_flags() -> None:
    """Defines `--contest` and its other flags, except `--output`."""
    flags.DEFINE_string("contest", "", "File of a contest; runs it.")
    flags.DEFINE_list("only", [], "Contestants to run; all unless given.")
    flags.DEFINE_list("rows", [], "Rows to judge; all unless given.")
    flags.DEFINE_multi_string("records", [], "Files of records to judge; nothing runs.")


def hold_contest(given: flags.FlagValues) -> None:
    """Runs or judges the contest of the command line.

    Raises:
        BenchError: A contest, selection, record or number is invalid.
    """
    simulated = simulation(given.simulated_devices)
    variables = {name.upper(): str(value) for name, value in simulated.items()}
    records = [local_path("records", path) for path in given.records]
    compete(
        local_path("contest", given.contest),
        Selection(only=given.only, rows=given.rows, records=records),
        output=local_path("output", given.output or OUTPUT),
        environment=os.environ | variables,
    )


def check_contest_flags(given: flags.FlagValues) -> None:
    """Refuses contest flags without a contest, and settings of a run beside one.

    Raises:
        ConfigError: Names every flag that has no effect.
    """
    names, problem = CONTEST_FLAGS, "has no effect without --contest"
    remedy = "leave it out"
    if given.contest:
        problem, remedy = "has no effect on a contest", "write it in the contest's file"
        names = settings_given(given)
    refuse_flags(names, problem, remedy, given)
