"""When each stage of a pipeline works on what: schedules as tables.

All stages run one program in lock step. In a tick each of them may take one forward
pass, one backward pass and one pass that makes gradients of weights alone, in that
order; then all hand their results on. A tick takes as long as the passes that any
stage takes in it, so that a schedule is good if its passes lie in few ticks.

A stage may hold several chunks of layers: chunk c of stage s comes behind chunk c of
stage s - 1 and, on the first stage, behind chunk c - 1 of the last.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

Name = Literal["gpipe", "1f1b", "interleaved", "zb_h1"]
Kind = str
KINDS: tuple[Kind, ...] = ("forward", "backward", "weights")
"""The passes by name, in the order in which a tick takes them."""
IDLE = -1


@dataclasses.dataclass(frozen=True)
class Lane:
    """The passes of one kind.

    A stage that takes none computes all the same: a forward pass of anything, which it
    writes to the last slot; or a backward pass on what its latest forward pass left,
    with all that this one read: else that might not be finite.

    Args:
        microbatch: int32[ticks, stages]; `IDLE` where a stage takes none.
        context: int32[ticks, stages], the microbatch whose context and key are read.
        chunk: int32[ticks, stages], that of its layers.
        slot: int32[ticks, stages], where a stage keeps what the forward pass leaves to
            the others.
        handed: int32[ticks, stages], where it keeps what the backward pass leaves to
            that of weights; the last slot where it takes none.
    """

    microbatch: Any
    context: Any
    chunk: Any
    slot: Any
    handed: Any


@dataclasses.dataclass(frozen=True)
class Phase:
    """Ticks from `start` to below `end`, which take the same kinds of passes."""

    start: int
    end: int
    kinds: tuple[Kind, ...]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The passes of all stages.

    Args:
        name: How it was made.
        num_stages: Stages, 1 or more.
        num_microbatches: Microbatches, 1 or more.
        num_chunks: Chunks of layers of each stage, 1 or more.
        lanes: Tables by kind; `weights` only where these passes are apart.
        num_slots: Forward passes that wait for others on one stage, at most.
        num_handed: Backward passes that wait for that of weights, at most.
    """

    name: Name
    num_stages: int
    num_microbatches: int
    num_chunks: int
    lanes: dict[Kind, Lane]
    num_slots: int
    num_handed: int

    @functools.cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Runs of ticks that take the same kinds of passes."""
        busy = {k: (lane.microbatch != IDLE).any(1) for k, lane in self.lanes.items()}
        columns = [tuple(k for k in busy if busy[k][t]) for t in range(self.num_ticks)]
        starts = [
            t for t, kinds in enumerate(columns) if t == 0 or kinds != columns[t - 1]
        ]
        ends = [*starts[1:], self.num_ticks]
        return tuple(map(Phase, starts, ends, (columns[t] for t in starts)))

    @property
    def num_ticks(self) -> int:
        """Ticks from the first pass to the last."""
        return len(self.lanes["forward"].microbatch)

    def time(self, costs: Mapping[Kind, int | float]) -> float:
        """How long all ticks take.

        Args:
            costs: Of a pass of a whole stage; where gradients of weights are not apart
                they are part of `backward`, which their cost is added to.

        Returns:
            The sum over ticks of the passes that any stage takes, in the unit of the
            costs; handing on is free.

        Example:
            >>> schedule = make_schedule("1f1b", num_stages=4, num_microbatches=8)
            >>> schedule.time({"forward": 1, "backward": 1, "weights": 1})
            33.0
        """
        own = dict(costs)
        if "weights" not in self.lanes:
            own["backward"] += own.pop("weights")
        ticks = (
            (phase.end - phase.start) * own[kind]
            for phase in self.phases
            for kind in phase.kinds
        )
        return sum(ticks) / self.num_chunks

    def bubble(self, costs: Mapping[Kind, int | float]) -> float:
        """The share of its time in which a stage has nothing to do.

        Args:
            costs: As for `time`.

        Returns:
            0 to below 1.

        Example:
            >>> schedule = make_schedule("gpipe", num_stages=2, num_microbatches=3)
            >>> schedule.bubble({"forward": 1, "backward": 1, "weights": 1})
            0.25
        """
        return 1 - self.num_microbatches * sum(costs.values()) / self.time(costs)


def make_schedule(
    name: Name, *, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> Schedule:
    """Lays out the passes of a step.

    - `gpipe` takes all forward passes first, so that all microbatches wait;
    - `1f1b` takes a backward pass with each forward pass as soon as the first
      microbatch is back, so that at most 2 * num_stages - 1 wait;
    - `interleaved` is the same for stages of several chunks, whose idle time is that
      much shorter;
    - `zb_h1` is `1f1b` with gradients of weights apart: none of their passes falls into
      the time in which the pipeline fills or empties.

    Args:
        name: The rule.
        num_stages: Stages, 1 or more.
        num_microbatches: Microbatches, 1 or more; under several chunks a multiple of
            the stages.
        num_chunks: Chunks of each stage; more than 1 under `interleaved` alone.

    Returns:
        The tables.

    Example:
        >>> schedule = make_schedule("1f1b", num_stages=2, num_microbatches=3)
        >>> schedule.lanes["forward"].microbatch.T.tolist()
        [[0, 1, 2, -1, -1], [-1, 0, 1, 2, -1]]
        >>> schedule.lanes["backward"].microbatch.T.tolist()
        [[-1, -1, 0, 1, 2], [-1, 0, 1, 2, -1]]

    Reference:
        GPipe (arXiv:1811.06965); 1F1B: PipeDream-Flush (arXiv:2006.09503, section 3);
        interleaved: Megatron-LM (arXiv:2104.04473, section 2.2); gradients of weights
        apart: Zero Bubble (arXiv:2401.10241, section 2).
    """
    num_units = num_microbatches * num_chunks
    unit = np.arange(num_units)[:, None]
    stage = np.arange(num_stages)[None]
    # The last chunk of the last stage has the first microbatch in this tick.
    first = num_chunks * num_stages - 1
    first = num_units + num_stages - 1 if name == "gpipe" else first
    ticks: dict[Kind, np.ndarray] = {
        "forward": unit + stage,
        "backward": first + unit + num_stages - 1 - stage,
    }
    if name == "zb_h1":
        ticks["weights"] = first + unit + num_stages - 1 + 0 * stage
    microbatch, chunk = _units(num_stages, num_microbatches, num_chunks)
    chunks = {k: chunk if k == "forward" else num_chunks - 1 - chunk for k in ticks}
    num_ticks = 1 + max(int(x.max()) for x in ticks.values())
    tables = _Tables(ticks, microbatch, chunks, num_ticks)
    slots, num_slots = tables.slots("forward", list(ticks)[-1])
    handed, num_handed = (
        tables.slots("backward", "weights") if "weights" in ticks else ({}, 0)
    )
    lanes = {
        kind: Lane(
            tables.table(kind, tables.microbatches(kind), IDLE),
            tables.table(kind, tables.microbatches(kind), 0),
            tables.table(kind, tables.chunks_of(kind), 0),
            tables.table(kind, slots[kind], num_slots if kind == "forward" else 0),
            tables.table(kind, handed.get(kind, 0 * ticks[kind]), num_handed),
        )
        for kind in ticks
    }
    lanes["backward"] = _reading(lanes["backward"], lanes["forward"])
    return Schedule(
        name, num_stages, num_microbatches, num_chunks, lanes, num_slots, num_handed
    )


def _reading(lane: Lane, forward: Lane) -> Lane:
    """Idle stages read what their latest forward pass left, and what it read."""
    ticks = np.arange(len(lane.microbatch))[:, None]
    latest = np.maximum.accumulate(np.where(forward.microbatch != IDLE, ticks, 0))
    found = {
        name: np.where(
            lane.microbatch == IDLE,
            np.take_along_axis(getattr(forward, name), latest, 0),
            getattr(lane, name),
        )
        for name in ("context", "chunk", "slot")
    }
    return dataclasses.replace(lane, **found)


def _units(num_stages, num_microbatches, num_chunks):
    """Microbatch and chunk of the forward passes of a stage, in their order."""
    group, place = np.divmod(
        np.arange(num_microbatches * num_chunks), num_stages * num_chunks
    )
    if num_chunks == 1:
        return np.arange(num_microbatches), np.zeros(num_microbatches, int)
    return group * num_stages + place % num_stages, place // num_stages


@dataclasses.dataclass(frozen=True)
class _Tables:
    """Passes by unit and stage, to be written down by tick and stage."""

    ticks: dict[Kind, np.ndarray]
    microbatch: np.ndarray
    chunks: dict[Kind, np.ndarray]
    num_ticks: int

    def table(self, kind: Kind, values: np.ndarray, idle: int) -> np.ndarray:
        ticks = self.ticks[kind]
        found = np.full((self.num_ticks, ticks.shape[1]), idle, np.int32)
        found[ticks, np.arange(ticks.shape[1])[None]] = values
        return found

    def microbatches(self, kind: Kind) -> np.ndarray:
        return self.microbatch[:, None] + 0 * self.ticks[kind]

    def chunks_of(self, kind: Kind) -> np.ndarray:
        return self.chunks[kind][:, None] + 0 * self.ticks[kind]

    def slots(self, source: Kind, last: Kind) -> tuple[dict[Kind, np.ndarray], int]:
        """Where each stage keeps what passes of one kind leave to the later ones."""
        kinds = [k for k in self.ticks if KINDS.index(source) <= KINDS.index(k)]
        found = {kind: np.zeros_like(self.ticks[kind]) for kind in kinds}
        most = 0
        for stage in range(self.ticks[source].shape[1]):
            free: list[int] = []
            held: dict[tuple[int, int], int] = {}
            for tick in range(self.num_ticks):
                for kind in kinds:
                    for unit in np.flatnonzero(self.ticks[kind][:, stage] == tick):
                        name = (self.microbatch[unit], self.chunks[kind][unit])
                        if kind == source:
                            held[name] = free.pop() if free else len(held)
                            most = max(most, len(held) + len(free))
                        found[kind][unit, stage] = held[name]
                        if kind == last:
                            free.append(held.pop(name))
        return found, most
