"""Turns records of contestants into results: the best of each side."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zjax.bench.contest import Case, Row
from zjax.bench.result import Comparison, Result, Side
from zjax.bench.turns import Machine, Record
from zjax.errors import BenchError, Problem


def missing(row: Row, records: Sequence[Record]) -> str:
    """Why a claim cannot be judged; empty if it can."""
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
    """Compares the best of each side, for a claim of which nothing is `missing`.

    Args:
        row: The claim.
        records: Records of its contestants and others, all from one machine.
        command: Command that measures this row.

    Raises:
        BenchError: A contestant's result lacks the metric.
    """
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
    """The most devices that a contestant used, which may be fewer than there are."""
    return max(r.result.get("num_devices", machine.num_devices) for r in records)


def _compare(
    case: Case, known: Mapping[str, Record], row: Row, machine: Machine
) -> Comparison:
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
    if not isinstance(number, Mapping):
        number = {"median": number, "min": number, "max": number, "n": 1}
    return Side(name=name, unit=unit, **number)


def _notes(row: Row, known: Mapping[str, Record]) -> list[str]:
    failed = [f"{name}: {r.failure}" for name, r in known.items() if r.failure]
    return [note for note in (row.notes, *failed) if note]
