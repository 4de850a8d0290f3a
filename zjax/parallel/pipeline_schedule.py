"""Pipeline schedules as tables: when each stage works on which microbatch.

All stages run one program in lock step. In a tick each stage runs at most one forward
pass, one backward pass and one pass for the gradients of weights, in this order; then
all stages send the results on. A tick takes as long as the passes that any stage runs,
so a good schedule puts passes into few ticks.

A stage may hold several chunks of layers: chunk c of stage s follows chunk c of stage s
- 1; on the first stage it follows chunk c - 1 of the last stage.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np

Name = Literal["gpipe", "1f1b", "interleaved", "zb_h1"]
Kind = str
KINDS: tuple[Kind, ...] = ("forward", "backward", "weights")
"""The passes by name, in the order in which a tick runs them."""
IDLE = -1


@dataclasses.dataclass(frozen=True)
class StageSchedule:
    """The passes of one kind: of all stages, of one tick, or of one stage in a tick.

    An idle stage computes, too. An idle forward pass runs on arbitrary values and
    writes to the last buffer slot. An idle backward pass reads the residuals and the
    context of the latest forward pass; on arbitrary residuals the result might not be
    finite.

    Args:
        microbatch: int32[ticks, stages]; `IDLE` where a stage has no pass.
        context: int32[ticks, stages], the microbatch of the context and the key read.
        chunk: int32[ticks, stages], the chunk of layers.
        residuals: int32[ticks, stages], buffer slot of the residuals of a forward pass.
        operands: int32[ticks, stages], buffer slot of the operands of the pass of
            weights; the last slot in ticks without operands.
    """

    microbatch: Any
    context: Any
    chunk: Any
    residuals: Any
    operands: Any


@dataclasses.dataclass(frozen=True)
class TickTable:
    """The passes of one kind, and the microbatches at both ends of the pipeline.

    Embedding and loss run outside of the stages, in the ticks that have a microbatch
    for either.

    Args:
        stages: The passes.
        first: int32[ticks], the microbatch in the first chunk of the first stage, or
            `IDLE`.
        last: int32[ticks], the microbatch in the last chunk of the last stage, or
            `IDLE`.
    """

    stages: StageSchedule
    first: Any
    last: Any


for _record in (StageSchedule, TickTable):
    _fields = [field.name for field in dataclasses.fields(_record)]
    jax.tree_util.register_dataclass(_record, _fields, [])


@dataclasses.dataclass(frozen=True)
class Phase:
    """Ticks from `start` to below `end`, with equal kinds of passes."""

    start: int
    end: int
    kinds: tuple[Kind, ...]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The passes of all stages.

    Args:
        num_chunks: Chunks of layers of each stage, 1 or more.
        passes: Tables by kind; `weights` only where the schedule separates the
            gradients of weights.
        num_slots: Most forward passes of a stage with residuals held at once.
        num_operands: Most backward passes that wait for the pass of weights.
    """

    name: Name
    num_stages: int
    num_microbatches: int
    num_chunks: int
    passes: dict[Kind, StageSchedule]
    num_slots: int
    num_operands: int

    @functools.cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Consecutive ticks that run equal kinds of passes."""
        busy = {
            k: (table.microbatch != IDLE).any(1) for k, table in self.passes.items()
        }
        columns = [tuple(k for k in busy if busy[k][t]) for t in range(self.num_ticks)]
        starts = [
            t for t, kinds in enumerate(columns) if t == 0 or kinds != columns[t - 1]
        ]
        ends = [*starts[1:], self.num_ticks]
        return tuple(map(Phase, starts, ends, (columns[t] for t in starts)))

    @property
    def num_ticks(self) -> int:
        """Ticks from the first pass to the last."""
        return len(self.passes["forward"].microbatch)

    @functools.cached_property
    def tables(self) -> dict[Kind, TickTable]:
        """Tables by kind, each NumPy array with ticks along the first dim.

        Example:
            >>> schedule = make_schedule("1f1b", num_stages=2, num_microbatches=3)
            >>> schedule.tables["backward"].last.tolist()
            [-1, 0, 1, 2, -1]
        """
        last_chunk = self.num_chunks - 1

        def table(passes: StageSchedule) -> TickTable:
            first = np.where(passes.chunk[:, 0] == 0, passes.microbatch[:, 0], IDLE)
            is_last = passes.chunk[:, -1] == last_chunk
            return TickTable(
                passes, first, np.where(is_last, passes.microbatch[:, -1], IDLE)
            )

        return {kind: table(passes) for kind, passes in self.passes.items()}

    def time(self, costs: Mapping[Kind, int | float]) -> float:
        """Time of all ticks, in the unit of the costs; communication is free.

        Costs are for a pass of a whole stage. The cost of `weights` joins `backward`
        where the schedule does not separate the two.

        Example:
            >>> schedule = make_schedule("1f1b", num_stages=4, num_microbatches=8)
            >>> schedule.time({"forward": 1, "backward": 1, "weights": 1})
            33.0
        """
        cost_of = dict(costs)
        if "weights" not in self.passes:
            cost_of["backward"] += cost_of.pop("weights")
        ticks = (
            (phase.end - phase.start) * cost_of[kind]
            for phase in self.phases
            for kind in phase.kinds
        )
        # Costs are of a whole stage; a pass runs one of its chunks.
        return sum(ticks) / self.num_chunks

    def bubble(self, costs: Mapping[Kind, int | float]) -> float:
        """Share of the time in which a stage is idle, 0 to below 1.

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

    - `gpipe` runs all forward passes first, and holds residuals of all microbatches;
    - `1f1b` runs a backward pass with each forward pass once the first microbatch has
      reached the last stage, and holds at most 2 * num_stages - 1;
    - `interleaved` is `1f1b` with several chunks per stage, and idles that much less;
    - `zb_h1` is `1f1b` with separate passes for the gradients of weights, none of which
      falls into the time in which the pipeline fills or drains.

    Under several chunks, which `interleaved` alone has, `num_microbatches` is a
    multiple of `num_stages`.

    Example:
        >>> schedule = make_schedule("1f1b", num_stages=2, num_microbatches=3)
        >>> schedule.passes["forward"].microbatch.T.tolist()
        [[0, 1, 2, -1, -1], [-1, 0, 1, 2, -1]]
        >>> schedule.passes["backward"].microbatch.T.tolist()
        [[-1, -1, 0, 1, 2], [-1, 0, 1, 2, -1]]

    Reference:
        GPipe (arXiv:1811.06965); 1F1B: PipeDream-Flush (arXiv:2006.09503, section 3);
        interleaved: Megatron-LM (arXiv:2104.04473, section 2.2); `zb_h1`: Zero Bubble
        (arXiv:2401.10241, section 2).
    """
    ticks = _ticks(name, num_stages, num_microbatches, num_chunks)
    microbatch, chunk = _units(num_stages, num_microbatches, num_chunks)
    chunks = {k: chunk if k == "forward" else num_chunks - 1 - chunk for k in ticks}
    num_ticks = 1 + max(int(x.max()) for x in ticks.values())
    tables = _Tables(ticks, microbatch, chunks, num_ticks)
    slots, num_slots = tables.slots("forward", list(ticks)[-1])
    operands, num_operands = (
        tables.slots("backward", "weights") if "weights" in ticks else ({}, 0)
    )
    passes = {
        kind: StageSchedule(
            tables.table(kind, tables.microbatches(kind), IDLE),
            tables.table(kind, tables.microbatches(kind), 0),
            tables.table(kind, tables.chunks_of(kind), 0),
            # Idle forward passes write to the extra slot `num_slots`, which nobody
            # reads.
            tables.table(kind, slots[kind], num_slots if kind == "forward" else 0),
            tables.table(kind, operands.get(kind, 0 * ticks[kind]), num_operands),
        )
        for kind in ticks
    }
    passes["backward"] = _with_idle_reads(passes["backward"], passes["forward"])
    return Schedule(
        name, num_stages, num_microbatches, num_chunks, passes, num_slots, num_operands
    )


def _ticks(
    name: Name, num_stages: int, num_microbatches: int, num_chunks: int
) -> dict[Kind, np.ndarray]:
    """Tick of each pass by kind, int[units, stages]."""
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
        # Once the backward pass has reached stage 0: no stage waits for this pass.
        ticks["weights"] = first + unit + num_stages - 1 + 0 * stage
    return ticks


def _with_idle_reads(backward: StageSchedule, forward: StageSchedule) -> StageSchedule:
    """Makes idle stages read residuals and context of the last forward pass."""
    ticks = np.arange(len(forward.microbatch))[:, None]
    # In the context of another pass exponentials of saved logarithms overflow, and
    # infinity times a cotangent of 0 would spoil the sum of gradients.
    latest = np.maximum.accumulate(np.where(forward.microbatch != IDLE, ticks, 0))
    columns = {
        name: np.where(
            backward.microbatch == IDLE,
            np.take_along_axis(getattr(forward, name), latest, 0),
            getattr(backward, name),
        )
        for name in ("context", "chunk", "residuals")
    }
    return dataclasses.replace(backward, **columns)


def _units(num_stages, num_microbatches, num_chunks):
    """Microbatch and chunk of the forward passes of a stage, in order."""
    group, place = np.divmod(
        np.arange(num_microbatches * num_chunks), num_stages * num_chunks
    )
    if num_chunks == 1:
        return np.arange(num_microbatches), np.zeros(num_microbatches, int)
    # Each group of `num_stages` microbatches runs chunk 0, then chunk 1, and so on.
    return group * num_stages + place % num_stages, place // num_stages


@dataclasses.dataclass(frozen=True)
class _Tables:
    """Passes by unit and stage, which become tables by tick and stage."""

    ticks: dict[Kind, np.ndarray]
    microbatch: np.ndarray
    chunks: dict[Kind, np.ndarray]
    num_ticks: int

    def table(self, kind: Kind, values: np.ndarray, idle: int) -> np.ndarray:
        """Scatters values by unit and stage into a table; idle stages get `idle`."""
        ticks = self.ticks[kind]
        table = np.full((self.num_ticks, ticks.shape[1]), idle, np.int32)
        table[ticks, np.arange(ticks.shape[1])[None]] = values
        return table

    def microbatches(self, kind: Kind) -> np.ndarray:
        return self.microbatch[:, None] + 0 * self.ticks[kind]

    def chunks_of(self, kind: Kind) -> np.ndarray:
        return self.chunks[kind][:, None] + 0 * self.ticks[kind]

    def slots(self, source: Kind, last: Kind) -> tuple[dict[Kind, np.ndarray], int]:
        """Assigns buffer slots to the values that passes of kind `source` save.

        Returns slots by kind, and the most slots in use; a slot is free after the pass
        `last`.
        """
        kinds = [k for k in self.ticks if KINDS.index(source) <= KINDS.index(k)]
        slots = {kind: np.zeros_like(self.ticks[kind]) for kind in kinds}
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
                        slots[kind][unit, stage] = held[name]
                        if kind == last:
                            free.append(held.pop(name))
        return slots, most
