"""Tables of passes: their order, their time, and what waits in the meantime."""

import itertools

import numpy as np
import pytest

from tests.reference import stages
from zjax.parallel.pipeline_schedule import IDLE, KINDS, make_schedule

EQUAL = {"forward": 1, "backward": 1, "weights": 1}
CASES = [
    *itertools.product(("gpipe", "1f1b", "zb_h1"), (1, 2, 3, 4, 8), (1, 2, 5, 8), (1,)),
    *itertools.product(("interleaved",), (2, 4), (4, 8), (2, 3)),
]


def make(name, num_stages, num_microbatches, num_chunks):
    return make_schedule(
        name,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
    )


def passes(schedule):
    """(tick, place of its kind in the tick, kind, stage, microbatch, chunk) of each."""
    for order, kind in enumerate(KINDS):
        own = schedule.passes.get(kind)
        if own is not None:
            for tick, stage in np.argwhere(own.microbatch != IDLE):
                yield (
                    tick,
                    order,
                    kind,
                    stage,
                    int(own.microbatch[tick, stage]),
                    int(own.chunk[tick, stage]),
                )


def orders(schedule):
    found = [[] for _ in range(schedule.num_stages)]
    for _, _, kind, stage, microbatch, chunk in sorted(passes(schedule)):
        found[stage].append((kind[0].upper(), microbatch, chunk))
    return found


@pytest.mark.parametrize("case", CASES)
def test_every_pass_is_taken_once_and_reads_what_came_in_the_tick_before(case):
    """Fails if a neighbour, a microbatch or a chunk is not the right one."""
    schedule = make(*case)
    _, size, num_microbatches, num_chunks = case
    at = {(kind, *rest): tick for tick, _, kind, *rest in passes(schedule)}
    assert len(at) == len(list(passes(schedule)))
    assert len(at) == len(schedule.passes) * size * num_microbatches * num_chunks
    for (kind, stage, microbatch, chunk), tick in at.items():
        place = chunk * size + stage
        if kind == "weights":
            assert at["backward", stage, microbatch, chunk] <= tick
            continue
        if kind == "backward":
            assert at["forward", stage, microbatch, chunk] <= tick
        before = place - 1 if kind == "forward" else place + 1
        if 0 <= before < size * num_chunks:
            sender = kind, before % size, microbatch, before // size
            assert at[sender] == tick - 1


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_written_where_something_waits(case):
    schedule = make(*case)
    for table, writer, last in (
        ("residuals", "forward", list(schedule.passes)[-1]),
        ("operands", "backward", "weights"),
    ):
        if last not in schedule.passes:
            continue
        holds = {}
        for _, _, kind, stage, *unit in sorted(passes(schedule)):
            if KINDS.index(kind) < KINDS.index(writer):
                continue
            own = schedule.passes[kind]
            (tick,) = (
                t
                for t in range(schedule.num_ticks)
                if [own.microbatch[t, stage], own.chunk[t, stage]] == unit
            )
            slot = int(getattr(own, table)[tick, stage])
            assert (
                slot < (schedule.num_slots, schedule.num_operands)[table == "operands"]
            )
            if kind == writer:
                assert (stage, slot) not in holds
                holds[stage, slot] = unit
            assert holds[stage, slot] == unit
            if kind == last:
                del holds[stage, slot]
        assert not holds


def test_idle_stages_write_where_none_reads():
    for case in CASES:
        schedule = make(*case)
        idle = {k: own.microbatch == IDLE for k, own in schedule.passes.items()}
        slot = schedule.passes["forward"].residuals[idle["forward"]]
        assert (slot == schedule.num_slots).all()
        for kind, own in schedule.passes.items():
            assert (own.operands[idle[kind]] == schedule.num_operands).all()


def test_idle_stages_read_what_was_written():
    """Fails if a backward pass of nothing may meet what is not a number, as what one
    microbatch or chunk left may be with the context or the layers of another; gradients
    of weights, which are added without a cotangent, have no such pass."""
    for case in CASES:
        schedule = make(*case)
        forward, backward = (schedule.passes[kind] for kind in ("forward", "backward"))
        in_use = {t for p in schedule.phases if "backward" in p.kinds for t in ticks(p)}
        for stage in range(schedule.num_stages):
            written = {}
            for tick in range(schedule.num_ticks):
                *unit, slot = entry(forward, tick, stage)
                if forward.microbatch[tick, stage] != IDLE:
                    written[slot] = unit
                *unit, slot = entry(backward, tick, stage)
                if tick in in_use:
                    assert written[slot] == unit
        for phase in schedule.phases:
            if "weights" in phase.kinds:
                table = schedule.passes["weights"].microbatch
                assert (table[phase.start : phase.end] != IDLE).all()


def entry(own, tick, stage):
    names = "context", "chunk", "residuals"
    return [int(getattr(own, name)[tick, stage]) for name in names]


def test_passes_read_the_context_of_their_microbatch():
    for case in CASES:
        for own in make(*case).passes.values():
            is_due = own.microbatch != IDLE
            assert (own.context[is_due] == own.microbatch[is_due]).all()


def ticks(phase):
    return range(phase.start, phase.end)


def test_the_simulator_gives_the_times_of_the_papers():
    """The goldens of the schedules as they are written for stages that run freely."""
    apart = {"F": 1, "B": 1, "W": 1}
    whole = {"F": 1, "B": 2}
    free = stages.simulate(stages.one_f_one_b(4, 8), whole)
    assert stages.makespan(free) == 33
    assert [stages.most_alive(free, s) for s in range(4)] == [4, 3, 2, 1]
    free = stages.simulate(stages.interleaved(4, 8, 2), whole, num_chunks=2)
    assert stages.makespan(free) == 28.5
    assert [stages.most_alive(free, s) for s in range(4)] == [11, 9, 7, 5]
    for size, number, time in ((4, 8, 27), (8, 16, 55)):
        free = stages.simulate(stages.zero_bubble(size, number), apart)
        assert stages.makespan(free) == time
    free = stages.simulate(stages.zero_bubble(4, 12, second=True), apart)
    assert stages.makespan(free) == 39
    for stage in range(4):
        spans = [span for (s, *_), span in free.items() if s == stage]
        first, last = min(a for a, _ in spans), max(b for _, b in spans)
        assert last - first == 36


@pytest.mark.parametrize(
    ("case", "time", "num_slots"),
    [
        (("gpipe", 4, 8, 1), 33, 8),
        (("1f1b", 4, 8, 1), 33, 7),
        (("interleaved", 4, 8, 2), 28.5, 11),
        (("zb_h1", 4, 8, 1), 30, 7),
        (("1f1b", 8, 16, 1), 69, 15),
        (("zb_h1", 8, 16, 1), 62, 15),
        (("1f1b", 4, 2, 1), 15, 2),
    ],
)
def test_time_in_lock_step(case, time, num_slots):
    schedule = make(*case)
    assert schedule.time(EQUAL) == time
    assert schedule.num_slots == num_slots


@pytest.mark.parametrize("case", [case for case in CASES if case[1] > 1])
def test_lock_step_costs_nothing_but_the_freedom_of_zero_bubble(case):
    """Stages that ran freely in the same order would take as long, or less only where
    gradients of weights are apart."""
    name, size, number, num_chunks = case
    schedule = make(*case)
    costs = {"F": 1, "B": 1, "W": 1} if name == "zb_h1" else {"F": 1, "B": 2}
    free = stages.simulate(orders(schedule), costs, num_chunks)
    if name == "zb_h1":
        assert schedule.time(EQUAL) == 3 * number + 2 * (size - 1)
        assert stages.makespan(free) <= schedule.time(EQUAL)
    else:
        assert schedule.time(EQUAL) == 3 * (number + (size - 1) / num_chunks)
        assert stages.makespan(free) == pytest.approx(schedule.time(EQUAL))


def test_waiting_grows_with_the_microbatches_under_gpipe_alone():
    for size, number in ((4, 16), (4, 3), (2, 9)):
        assert make("gpipe", size, number, 1).num_slots == number
        expected = min(2 * size - 1, number)
        assert make("1f1b", size, number, 1).num_slots == expected


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_h1"])
def test_every_microbatch_is_first_and_last_once(name):
    chunks = 2 if name == "interleaved" else 1
    schedule = make_schedule(name, num_stages=4, num_microbatches=8, num_chunks=chunks)
    for kind in ("forward", "backward"):
        for numbers in (schedule.tables[kind].first, schedule.tables[kind].last):
            assert sorted(numbers[numbers != IDLE]) == list(range(8))


def test_1f1b_takes_the_head_in_whole_phases():
    """Fails if the ticks in which a pipeline empties run products of the vocabulary."""
    schedule = make_schedule("1f1b", num_stages=4, num_microbatches=8)
    last = schedule.tables["backward"].last
    of_phases = [
        set(last[phase.start : phase.end] != IDLE)
        for phase in schedule.phases
        if "backward" in phase.kinds
    ]
    assert of_phases == [{True}, {False}]
