"""Engine: many requests through few programs, without waiting for the devices."""

import collections
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from zjax.generation.passes import Pieces, Rows
from zjax.generation.plan import Chunks, Lanes, Plan, lay_chunks, lay_lanes
from zjax.generation.programs import Passes
from zjax.generation.sampling import GREEDY, Chosen, Sampling, rows_of
from zjax.generation.scheduler import Scheduler
from zjax.generation.sequence import Sequence

NUM_AHEAD = 2
"""Passes on the devices at once: the results of the older are read meanwhile."""


class Request(NamedTuple):
    """How a sequence chooses tokens, as `Sequence.request`."""

    sampling: Sampling = GREEDY
    sample: int = 0
    """Number of the sequence among the samples of a prompt."""


class News(NamedTuple):
    """What a pass adds to a sequence."""

    sequence: Sequence
    tokens: list[int]
    logprobs: np.ndarray
    """float32[n], natural logarithm of each token's probability."""
    best_ids: np.ndarray
    """int32[n, N], most likely tokens."""
    best_logprobs: np.ndarray


class Engine:
    """Runs the passes that a scheduler plans, and hands out the new tokens.

    Args:
        passes: What reads passes.
        scheduler: What plans passes.
        end_ids: Ids that end texts whose sampling names none.
    """

    def __init__(
        self, passes: Passes, scheduler: Scheduler, *, end_ids: tuple[int, ...] = ()
    ):
        self.scheduler = scheduler
        self._passes, self._end_ids = passes, end_ids
        self._in_flight: collections.deque[tuple[Plan, Chosen]] = collections.deque()
        num_slots = scheduler.rows.max_rows + 1
        self._sequences: list[Sequence | None] = [None] * num_slots
        self._table: np.ndarray | None = None
        self._rows: Rows | None = None

    def run(self) -> Iterator[News]:
        """Yields what passes add, until all sequences have ended."""
        while (news := self.step()) is not None:
            yield from news

    def compile(self) -> None:
        """Starts to compile the passes of all sizes, passes of prompts first."""
        rows = jax.device_put(self._rows_of(self.scheduler.rows.lend_table()))
        no_slot = self.scheduler.rows.max_rows
        for size in sorted(self.scheduler.sizes, key=lambda size: -size.chunks):
            lanes = lay_lanes([], size.lanes, no_slot)
            chunks = lay_chunks([], size.chunks, no_slot)
            self._passes.compile(rows, *self._pieces(lanes, chunks))

    def close(self) -> None:
        """Drops what has not begun to compile; no step follows."""
        self._passes.close()

    def step(self) -> list[News] | None:
        """Plans passes ahead and waits for the oldest; returns None without any."""
        while len(self._in_flight) < NUM_AHEAD:
            plan = self.scheduler.plan()
            if plan is None:
                break
            self._in_flight.append((plan, self._start(plan)))
        if not self._in_flight:
            self._passes.rest()
            return None
        plan, chosen = self._in_flight.popleft()
        found = jax.device_get(chosen)
        results = self.scheduler.accept(plan, found.tokens[: plan.num_steps])
        return [
            News(
                result.sequence,
                result.tokens,
                *(x[: len(result.tokens), result.column] for x in found[1:]),
            )
            for result in results
        ]

    def _start(self, plan: Plan) -> Chosen:
        """Sends a pass to the devices; returns results that are still on the way."""
        for slot, sequence in plan.admitted:
            self._passes.remember(slot, np.array(sequence.tokens, np.int32))
            self._sequences[slot] = sequence
        pieces, sizes = self._pieces(plan.lanes, plan.chunks)
        rows = self._known_rows(plan)
        return self._passes.read(rows, pieces, sizes, plan.num_steps)

    def _pieces(self, lanes: Lanes, chunks: Chunks) -> tuple[list[Pieces], list[int]]:
        """Returns the pieces of a pass, and the most tokens of each kind."""
        pieces, sizes = [Pieces(*lanes, ends=lanes.counts > 0)], [1]
        if len(chunks.slots):
            prompt = chunks.slots, chunks.starts, chunks.counts, chunks.ends
            pieces.append(Pieces(*prompt))
            sizes.append(self.scheduler.chunk_size)
        return pieces, sizes

    def _known_rows(self, plan: Plan) -> Rows:
        """Returns what the devices know of slots, sent again where it has changed."""
        rows = self._rows
        if rows is None or plan.admitted:
            rows = jax.device_put(self._rows_of(plan.table))
        elif plan.table is not self._table:
            rows = rows._replace(table=jax.device_put(plan.table))
        self._rows, self._table = rows, plan.table
        return rows

    def _rows_of(self, table: np.ndarray) -> Rows:
        """Lays out what the devices know of slots."""
        sequences = self._sequences
        requests = [Request() if x is None else x.request for x in sequences]
        given = [0 if x is None else len(x.prompt) for x in sequences]
        new = [0 if x is None else x.max_new_tokens for x in sequences]
        num_given = np.array(given, np.int32)
        return Rows(
            table=table,
            num_given=num_given,
            num_tokens=num_given + np.array(new, np.int32),
            sampling=rows_of(
                [x.sampling for x in requests],
                [x.sample for x in requests],
                end_ids=self._end_ids,
            ),
        )
