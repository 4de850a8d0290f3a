"""Runs a contest of zjax and its peers, from the root of the repository.

python examples/benchmarks/contest.py examples/benchmarks/gpt_1p5b.py --rows=zero2_1p5b
"""

import argparse
import os
import sys

from contests.compete import Selection, compete

from zjax.errors import ZjaxError
from zjax.files import local_path
from zjax.run.compiler import simulation
from zjax.run.ending import exit_on_signals


def make_parser() -> argparse.ArgumentParser:
    """Parser of the command line."""
    summary, _, example = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=f"example: {example}", allow_abbrev=False
    )
    parser.add_argument("contest", help="file whose get_contest() returns a contest")
    parser.add_argument(
        "--only",
        type=_names,
        default=[],
        metavar="A,B",
        help="contestants to run; all that the rows need if absent",
    )
    parser.add_argument(
        "--rows",
        type=_names,
        default=[],
        metavar="A,B",
        help="rows to judge; all if absent",
    )
    parser.add_argument(
        "--records",
        action="append",
        default=[],
        metavar="FILE",
        help="file of records to judge, so that nothing runs; may be repeated",
    )
    parser.add_argument(
        "--output",
        default="runs/bench",
        metavar="FOLDER",
        help="folder for logs and records; %(default)s if absent",
    )
    parser.add_argument(
        "--simulated_devices",
        type=int,
        default=0,
        metavar="N",
        help="CPU devices to simulate",
    )
    return parser


def _names(text: str) -> list[str]:
    """Splits names at commas."""
    return [name.strip() for name in text.split(",")]


def main() -> None:
    """Runs or judges the contest of the command line."""
    given = make_parser().parse_args()
    exit_on_signals()  # so that no program is left running
    simulated = simulation(given.simulated_devices)
    variables = {name.upper(): str(value) for name, value in simulated.items()}
    try:
        compete(
            local_path("contest", given.contest),
            Selection(
                only=given.only,
                rows=given.rows,
                records=[local_path("records", path) for path in given.records],
            ),
            output=local_path("output", given.output),
            environment=os.environ | variables,
        )
    except ZjaxError as error:
        print(f"contest: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
