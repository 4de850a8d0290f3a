"""Holds a contest: runs its programs in turn, judges claims, writes results and pages.

Each side of a comparison enters with its best contestant.
"""

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from contests.contest import Case, Contest, Row, load_contest, unknown
from contests.pages import SUMMARY, update_pages
from contests.picture import draw_contest
from contests.result import (
    Comparison,
    Result,
    Side,
    format_number,
    verdict,
    write_result,
)
from contests.turns import (
    PEAK,
    SPEED,
    Machine,
    Record,
    find_machine,
    read_records,
    take_turns,
)
from zjax.errors import BenchError, Problem
from zjax.sharding.describe import format_bytes, render_table

COMMAND = "python examples/benchmarks/contest.py"
"""Command that results quote, run from the root of the repository."""


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
    output: str,
    environment: Mapping[str, str] = os.environ,
) -> list[Result]:
    """Runs a contest on this machine, or judges the records of one.

    Output and records of the programs go to `<output>/<contest>_x<devices>.log` and
    `.jsonl`. Each row whose contestants are all measured becomes a file in `results/`
    beside the contest, in favour of zjax or not. The summary in the working directory
    and its pages are rebuilt, and a picture is drawn.
    """
    contest = load_contest(path)
    _check(contest, selection)
    rows = [r for r in contest.rows if r.id in (selection.rows or _ids(contest))]
    if selection.records:
        records = read_records(selection.records)
    else:
        records = _run(contest, rows, selection, path, output, environment)
    print(f"\n{describe_records(records)}\n")
    folder = pathlib.Path(path).parent / "results"
    results, lines = [], []
    for row in rows:
        reason = missing(row, records)
        if reason:
            print(f"{row.id} is not judged: {reason}")
            continue
        command = f"{COMMAND} {path} --rows={row.id}"
        result = make_result(row, records, command=command)
        write_result(result, folder)
        results.append(result)
        lines += _summary(row.id, result)
    name = f"{pathlib.Path(path).stem}_x{records[0].machine.num_devices}"
    picture = folder / f"{name}.png"
    if draw_contest(contest, records, picture):
        print(f"picture: {picture}")
    if results:
        update_pages(SUMMARY, folder)
        columns = ("row", "ours", "peer", "ours / peer", "")
        print(render_table(columns, lines, right=(3,)))
    return results


def describe_records(records: Iterable[Record]) -> str:
    """Tabulates records: speed, peak memory, loss and failure of each contestant."""
    rows = []
    for record in records:
        result = record.result
        speed, peak = result.get(SPEED), result.get(PEAK)
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
    """Refuses names of a selection that the contest does not have."""
    names = [contestant.name for contestant in contest.contestants]
    problems = [
        *unknown("contestant", selection.only, names, "--only"),
        *unknown("row", selection.rows, _ids(contest), "--rows"),
    ]
    if problems:
        raise BenchError(*problems)


def _ids(contest: Contest) -> list[str]:
    """Ids of all rows, in order."""
    return [row.id for row in contest.rows]


def _run(
    contest: Contest,
    rows: Sequence[Row],
    selection: Selection,
    path: str,
    output: str,
    environment: Mapping[str, str],
) -> list[Record]:
    """Runs the selected contestants, or all that the rows need."""
    machine = find_machine(environment)
    wanted = selection.only or [name for row in rows for name in row.contestants()]
    chosen = [each for each in contest.contestants if each.name in wanted]
    stem = pathlib.Path(output) / f"{pathlib.Path(path).stem}_x{machine.num_devices}"
    return list(take_turns(chosen, machine, stem, environment))


def _summary(row: str, result: Result) -> list[tuple[str, ...]]:
    """Lines of the printed table of results, one per comparison."""
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


def missing(row: Row, records: Sequence[Record]) -> str:
    """Says why a row cannot be judged; empty if it can."""
    known = {record.name: record for record in records}
    absent = [name for name in row.contestants() if name not in known]
    if absent:
        return f"not measured: {', '.join(absent)}"
    for case in row.cases:
        for names in (case.ours, case.peer if isinstance(case.peer, tuple) else ()):
            if names and all(known[name].failure for name in names):
                return "; ".join(f"{name}: {known[name].failure}" for name in names)
    return ""


def make_result(row: Row, records: Sequence[Record], *, command: str) -> Result:
    """Compares the best of each side of a row that is not `missing` anything."""
    known = {r.name: r for r in records if r.name in row.contestants()}
    versions: dict[str, str] = {}
    for record in known.values():
        versions |= record.result.get("versions", {})
    machine = records[0].machine
    return Result(
        id=row.result_id(machine.num_devices),
        claim=row.claim,
        theme=row.theme,
        headline=row.headline,
        command=command,
        date=max(record.date for record in known.values()),
        device=f"{_num_devices(known.values(), machine)} x {machine.device}",
        versions=dict(sorted(versions.items())),
        cases=tuple(_compare(case, known, row, machine) for case in row.cases),
        higher_is_better=row.higher_is_better,
        notes="; ".join(_notes(row, known)),
    )


def _num_devices(records: Iterable[Record], machine: Machine) -> int:
    """The most devices that a contestant used, maybe fewer than the machine has."""
    return max(r.result.get("num_devices", machine.num_devices) for r in records)


def _compare(
    case: Case, known: Mapping[str, Record], row: Row, machine: Machine
) -> Comparison:
    """Compares the best contestant of zjax with the best peer, or a stated number."""
    ours = _best(case.ours, case.metric, case.unit, known, row.higher_is_better)
    if isinstance(case.peer, tuple):
        metric = case.peer_metric or case.metric
        peer = _best(case.peer, metric, case.unit, known, row.higher_is_better)
    else:
        number = case.peer(machine.num_devices) if callable(case.peer) else case.peer
        peer = _side(case.peer_name, number, case.unit)
    if case.peer_name:
        peer = Side(**{**vars(peer), "name": case.peer_name})
    return Comparison(case.name, ours, peer, case.must, case.aim)


def _best(
    names: Sequence[str],
    metric: str,
    unit: str,
    known: Mapping[str, Record],
    higher_is_better: bool,
) -> Side:
    """Finds the contestant with the best median among those that did not fail."""
    sides = []
    for name in names:
        if known[name].failure:
            continue
        number = known[name].result.get(metric)
        if number is None:
            problem = f"is not in the result of {name!r}"
            remedy = f"name one of {', '.join(sorted(known[name].result))}"
            raise BenchError(Problem("metric", metric, problem, remedy))
        sides.append(_side(name, number, unit))
    pick = max if higher_is_better else min
    return pick(sides, key=lambda side: side.median)


def _side(name: str, number: Any, unit: str) -> Side:
    """Makes a side of a number that was measured several times, or is alone."""
    if not isinstance(number, Mapping):
        number = {"median": number, "min": number, "max": number, "n": 1}
    return Side(name=name, unit=unit, **number)


def _notes(row: Row, known: Mapping[str, Record]) -> list[str]:
    """Lists the remarks of a row, and the contestants that failed."""
    failed = [f"{name}: {r.failure}" for name, r in known.items() if r.failure]
    return [note for note in (row.notes, *failed) if note]
