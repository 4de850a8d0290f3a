"""Engine: many requests through few programs, without waiting for the devices."""

import collections
import itertools
from collections.abc import Collection, Iterator
from collections.abc import Sequence as List
from typing import Any, NamedTuple

import jax
import numpy as np

from zjax.generation.passes import Rows
from zjax.generation.plan import Pieces, Plan, lay_plan
from zjax.generation.programs import Passes
from zjax.generation.records import Records, experts_of
from zjax.generation.sampling import (
    GREEDY,
    Chosen,
    Logprobs,
    Sampling,
    SamplingRows,
    rows_of,
)
from zjax.generation.scheduler import Scheduler
from zjax.generation.sequence import Sequence
from zjax.generation.shards import send

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
    """float32[n], natural logarithm of each token's probability, if a row asks."""
    best_ids: np.ndarray
    """int32[n, N], most likely tokens."""
    best_logprobs: np.ndarray
    prompt: Logprobs | None = None
    """Of the next tokens of the prompt, NumPy arrays; None if nothing is new. The first
    token of a prompt, which nothing predicts, is left out."""
    experts: np.ndarray | None = None
    """uint8 or int16 [tokens - 1, layers with experts, experts of a token], of all
    tokens before the last; None unless asked for. Later passes may change it."""


class Engine:
    """Runs the passes that a scheduler plans, and hands out the new tokens.

    Args:
        passes: What reads passes.
        scheduler: What plans passes.
        end_ids: Ids that end texts whose sampling names none.
        axes: Mesh axes that split rows into the data shards of the scheduler.
    """

    def __init__(
        self,
        passes: Passes,
        scheduler: Scheduler,
        *,
        end_ids: tuple[int, ...] = (),
        axes: tuple[str, ...] = (),
    ):
        self.scheduler = scheduler
        self._passes, self._end_ids, self._axes = passes, end_ids, axes
        self._records = Records([slots.pool for slots in scheduler.shards])
        self._in_flight: collections.deque[tuple[Plan, Chosen]] = collections.deque()
        # Of the host, and what the devices have of it. The last slot of a shard belongs
        # to padding.
        self._num_slots = scheduler.max_rows + 1
        num_rows = len(scheduler.shards) * self._num_slots
        self._host_rows = _lay_rows([None] * num_rows, end_ids)
        self._rows: Rows | None = None
        self._tables: tuple[np.ndarray, ...] = ()

    def run(self) -> Iterator[News]:
        """Yields what passes add, until all sequences have ended."""
        while (news := self.step()) is not None:
            yield from news

    def load(self) -> None:
        """Reads the weights that are still to be read; a pass may follow."""
        self._passes.load()

    def compile(self) -> None:
        """Starts to compile the passes of all sizes, passes of prompts first."""
        tables = [slots.lend_table() for slots in self.scheduler.shards]
        nothing = [[] for _ in tables]
        rows = self._send_rows(tables)
        for size in sorted(self.scheduler.sizes, key=lambda size: -size.chunks):
            plan = lay_plan(0, size, lanes=nothing, chunks=nothing, tables=tables)
            pieces = self._pieces(plan.lanes, plan.chunks)
            self._passes.compile(rows, *pieces, size.steps)

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
        found = _fetch(plan, chosen)
        if found.experts is not None:
            self._records.add(plan, found.experts)
        results = self.scheduler.accept(plan, found.tokens)
        return [
            News(
                result.sequence,
                result.tokens,
                *(x[: len(result.tokens), result.column] for x in found[1:4]),
                prompt=_join_scores(found.prompt, result.scored),
                experts=experts_of(result.sequence),
            )
            for result in results
        ]

    def _start(self, plan: Plan) -> Chosen:
        """Sends a pass to the devices; returns results that are still on the way."""
        pieces, sizes = self._pieces(plan.lanes, plan.chunks)
        rows = self._update_rows(plan)
        return self._passes.read(rows, pieces, sizes, plan.size.steps)

    def _pieces(self, lanes: Pieces, chunks: Pieces) -> tuple[list[Pieces], list[int]]:
        """Returns the pieces of a pass, and the most tokens of each kind."""
        pieces, sizes = [lanes], [1 + lanes.num_drafts]
        if len(chunks.slots):
            pieces.append(chunks)
            sizes.append(self.scheduler.chunk_size)
        return pieces, sizes

    def _update_rows(self, plan: Plan) -> Rows:
        """Returns what the devices know of slots, sent again where it has changed."""
        for shard, admitted in enumerate(plan.admitted):
            for slot, sequence in admitted:
                row = _lay_rows([sequence], self._end_ids)
                leaves = map(jax.tree.leaves, (self._host_rows, row))
                for all_rows, values in zip(*leaves, strict=True):
                    all_rows[shard * self._num_slots + slot] = values[0]
        self._remember(plan)
        rows, pairs = self._rows, zip(plan.tables, self._tables, strict=False)
        if rows is None or any(plan.admitted):
            rows = self._send_rows(plan.tables)
        elif any(new is not old for new, old in pairs):
            table = send(np.concatenate(plan.tables), self._axes)
            rows = rows._replace(table=table)
        self._rows, self._tables = rows, plan.tables
        return rows

    def _remember(self, plan: Plan) -> None:
        """Stores the tokens of sequences with a new slot, one of each shard at once."""
        nobody = self._num_slots - 1, None
        for column in itertools.zip_longest(*plan.admitted, fillvalue=nobody):
            slots = np.array([slot for slot, _ in column], np.int32)
            tokens = [np.array(x.tokens if x else [], np.int32) for _, x in column]
            self._passes.remember(slots, tokens)

    def _send_rows(self, tables: List[np.ndarray]) -> Rows:
        """Sends the pages, lengths and settings of all slots to the devices."""
        # Copies: a CPU device may share the memory of the host.
        rows = jax.tree.map(np.copy, self._host_rows)
        return send(Rows(np.concatenate(tables), *rows), self._axes)


def _fetch(plan: Plan, chosen: Chosen) -> Any:
    """Returns `Chosen` in NumPy, with zeros for log-probabilities that nobody asks for.

    Each array that is fetched costs the host time, in which a small model could write.
    """
    requests = (place.sequence.request for place in plan.places)
    if any(request.sampling.num_logprobs is not None for request in requests):
        return jax.device_get(chosen)
    zeros = [np.zeros(x.shape, x.dtype) for x in chosen[1:4]]
    fetched = chosen.tokens, chosen.prompt, chosen.experts
    tokens, *others = jax.device_get(fetched)
    return Chosen._make([tokens, *zeros, *others])


def _join_scores(
    prompt: Logprobs | None, scored: Collection[tuple[int, slice]]
) -> Logprobs | None:
    """Joins the new scores of the chunks of a sequence; None if there are none."""
    if prompt is None or not scored:
        return None
    pieces = [[x[chunk, tokens] for x in prompt] for chunk, tokens in scored]
    return Logprobs(*map(np.concatenate, zip(*pieces, strict=True)))


def _lay_rows(
    sequences: list[Sequence | None], end_ids: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, SamplingRows]:
    """Lays out what the devices know of slots besides pages, as in `Rows`."""
    requests = [Request() if x is None else x.request for x in sequences]
    given = np.array([0 if x is None else len(x.prompt) for x in sequences], np.int32)
    new = [0 if x is None else x.max_new_tokens for x in sequences]
    settings = rows_of(
        [x.sampling for x in requests], [x.sample for x in requests], end_ids=end_ids
    )
    return given, given + np.array(new, np.int32), settings
