"""`zjax bench --contest`: runs programs in turn, writes results, tables and a plot."""

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence

from zjax.bench.cells import format_number
from zjax.bench.contest import Contest, Row, load_contest, unknown
from zjax.bench.judge import make_result, missing
from zjax.bench.result import Result, verdict, write_result
from zjax.bench.table import update_table
from zjax.bench.turns import Record, find_machine, read_records, take_turns
from zjax.errors import BenchError
from zjax.observe.plot import ContestBar, plot_contest
from zjax.sharding.describe import format_bytes, render_table

TABLE = "BENCHMARKS.md"
_SPEED, _PEAK = "tokens_per_second_per_device", "peak_bytes"


@dataclasses.dataclass(frozen=True)
class Selection:
    """The part of a contest to run and judge.

    Args:
        only: Names of contestants to run; empty for all that the rows need. Rows that
            need others are left out.
        rows: Ids of the rows to judge; empty for all.
        records: Record files of earlier turns; if given, nothing runs.
    """

    only: Sequence[str] = ()
    rows: Sequence[str] = ()
    records: Sequence[str] = ()


def compete(
    path: str,
    selection: Selection,
    *,
    output: str = "runs/bench",
    environment: Mapping[str, str] = os.environ,
) -> list[Result]:
    """Runs a contest on this machine, or judges the records of one.

    Output and records of the programs go to `<output>/<contest>_x<devices>.log` and
    `.jsonl`. Then each row whose contestants are all measured becomes a file in
    `results/` beside the contest; `BENCHMARKS.md` (in the working directory) and the
    theme pages in `docs/benchmarks/` are rebuilt, and a plot is drawn.

    Args:
        path: Contest file.
        selection: What to run and to judge.
        output: Folder for logs and records.
        environment: Environment of the programs, besides their own variables.

    Returns:
        The results, in favour of zjax or not.

    Raises:
        BenchError: A contest, selection, record or number is invalid.
    """
    contest = load_contest(path)
    _check(contest, selection)
    rows = [r for r in contest.rows if r.id in (selection.rows or _ids(contest))]
    if selection.records:
        records = read_records(selection.records)
    else:
        records = _run(contest, rows, selection, path, output, environment)
    print(f"\n{describe_records(records)}\n")
    machine = records[0].machine
    folder = pathlib.Path(path).parent / "results"
    results, lines = [], []
    for row in rows:
        reason = missing(row, records)
        if reason:
            print(f"{row.id} is not judged: {reason}")
            continue
        command = f"zjax bench --contest={path} --rows={row.id}"
        result = make_result(row, records, command=command)
        write_result(result, folder)
        results.append(result)
        lines += _summary(row.id, result)
    name = f"{pathlib.Path(path).stem}_x{machine.num_devices}"
    _draw(contest, records, folder / f"{name}.png")
    if results:
        update_table(TABLE, folder)
        columns = ("row", "ours", "peer", "ours / peer", "")
        print(render_table(columns, lines, right=(3,)))
    return results


def describe_records(records: Iterable[Record]) -> str:
    """A table of the contestants' records."""
    rows = []
    for record in records:
        result = record.result
        speed, peak = result.get(_SPEED), result.get(_PEAK)
        rows.append(
            (
                record.name,
                f"{speed['median']:,.0f}" if speed else "",
                format_bytes(peak) if peak else "",
                f"{result['loss']:.3f}" if "loss" in result else "",
                record.failure,
            )
        )
    columns = ("contestant", "tokens/s/device", "peak", "loss", "failure")
    return render_table(columns, rows, right=(1, 2, 3))


def _check(contest: Contest, selection: Selection) -> None:
    names = [contestant.name for contestant in contest.contestants]
    problems = [
        *unknown("contestant", selection.only, names, "--only"),
        *unknown("row", selection.rows, _ids(contest), "--rows"),
    ]
    if problems:
        raise BenchError(*problems)


def _ids(contest: Contest) -> list[str]:
    return [row.id for row in contest.rows]


def _run(
    contest: Contest,
    rows: Sequence[Row],
    selection: Selection,
    path: str,
    output: str,
    environment: Mapping[str, str],
) -> list[Record]:
    machine = find_machine(environment)
    wanted = selection.only or [name for row in rows for name in row.contestants()]
    chosen = [each for each in contest.contestants if each.name in wanted]
    stem = pathlib.Path(output) / f"{pathlib.Path(path).stem}_x{machine.num_devices}"
    return list(take_turns(chosen, machine, stem, environment))


def _summary(row: str, result: Result) -> list[tuple[str, ...]]:
    lines = []
    for case in result.cases:
        name = f"{row}: {case.name}" if case.name else row
        sides = [
            f"{side.name}: {format_number(side.median, side.unit)}"
            for side in (case.ours, case.peer)
        ]
        meaning = verdict(case, result.higher_is_better)
        lines.append((name, *sides, f"{case.ratio:.3f}", meaning))
    return lines


def _draw(contest: Contest, records: Sequence[Record], path: pathlib.Path) -> None:
    kinds = {each.name: each.kind for each in contest.contestants}
    bars = [
        ContestBar(
            name=record.name,
            is_ours=kinds.get(record.name) == "zjax",
            tokens_per_second=record.result[_SPEED]["median"],
            tokens_per_second_range=(
                record.result[_SPEED]["min"],
                record.result[_SPEED]["max"],
            ),
            peak_bytes=record.result.get(_PEAK),
        )
        for record in records
        if _SPEED in record.result
    ]
    if bars:
        machine = records[0].machine
        where = f"{machine.num_devices} x {machine.device}"
        plot_contest(bars, path, title=f"{contest.title}, {where}")
        print(f"picture: {path}")
