"""A pass as arrays of few shapes: tokens to read, places of results.

The arrays of a pass have the data shards one after another, with equal parts; slots and
pages are numbered on each shard.
"""

import dataclasses
import itertools
from collections.abc import Sequence as List
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from zjax.generation.sequence import Sequence

NUM_STEPS = 8
"""Tokens that a lane reads one after another, in a pass of several steps."""
CHUNK_SIZE = 64
"""Tokens of a chunk of a prompt."""
Given = Any
"""Arrays of the host, or on the devices; plans know NumPy alone."""


_NO_POSITION = range(0)


class Size(NamedTuple):
    """Shape of a compiled pass on a data shard; a pass with drafts has no chunks."""

    lanes: int
    """Sequences that read tokens of the device, one after another."""
    chunks: int = 0
    """Chunks of prompts, each of one sequence."""
    width: int = 1
    """Tokens that a lane reads at once: the last token, and drafts of the next."""
    steps: int = 1
    """Tokens that a lane reads one after another; 1 with chunks or drafts."""

    def num_tokens(self, chunk_size: int) -> int:
        """Counts the tokens that a pass of the size computes at once."""
        return self.lanes * self.width + self.chunks * chunk_size

    def num_ahead(self, chunk_size: int) -> int:
        """Counts the tokens that the pass reads of a sequence at most."""
        return max(self.chunks * chunk_size, self.width, self.steps)

    def chunk_at(self, column: int) -> int:
        """Returns the chunk, among the chunks of all shards, of a column of results."""
        shard, place = divmod(column, self.lanes + self.chunks)
        return shard * self.chunks + place - self.lanes

    def lane_at(self, column: int) -> int | None:
        """Returns the lane, among the lanes of all shards, of a column of results."""
        shard, place = divmod(column, self.lanes + self.chunks)
        return shard * self.lanes + place if place < self.lanes else None


class Pieces(NamedTuple):
    """C pieces of sequences, of up to T tokens each: lanes, or chunks of prompts.

    A lane continues a sequence. Step s of a pass reads the last token of the slot at
    position `starts + s`, if s is below `counts`, and yields the next token. A lane
    with drafts reads the last token and `counts - 1` drafts in one step.

    A chunk has consecutive tokens of a prompt, which the device has since admission. A
    pass may have several chunks of one sequence: all write keys before any attends.

    An unused piece has the slot `max_rows`, which belongs to padding, and count 0.
    """

    slots: Int[Given, " C"]
    starts: Int[Given, " C"]
    """Position of the first token."""
    counts: Int[Given, " C"]
    """Tokens that the piece reads."""
    ends: Bool[Given, " C"]
    """Whether a new token follows: the piece has the last token of the slot."""
    drafts: Int[Given, "C D"]
    """Tokens that may follow the last token; D is 0 in a pass without drafts."""
    num_best: Int[Given, " C"] | None = None
    """Most likely tokens to find behind each token of a chunk, -1 to score none of the
    tokens; None if the pass scores no prompt, which is another program."""
    records: Bool[Given, " C"] | None = None
    """Whether the experts of the tokens are wanted. None if the pass has none, which
    is another program; the device returns the experts of all pieces."""

    @property
    def num_drafts(self) -> int:
        """Number of drafts for which the pass has room, 0 in chunks."""
        return self.drafts.shape[1]

    def at(self, step: Any) -> "Pieces":
        """Returns the one token that each lane reads in a step."""
        is_read = step < self.counts
        counts = is_read.astype(np.int32)
        starts, records = self.starts + step, self.records
        fields = self.slots, starts, counts, is_read, self.drafts
        return Pieces(*fields, records=records)


class Task(NamedTuple):
    """Tokens that a sequence reads in one lane or chunk."""

    sequence: Sequence
    slot: int
    start: int
    """Position of the first token read."""
    num_tokens: int
    num_new: int
    """New tokens; a chunk yields 1 at the end of the prompt, else 0."""
    drafts: List[int] = ()
    """Drafts among the tokens."""
    num_best: int = -1
    """Most likely tokens to find behind each token of a chunk; -1 scores no token."""

    @property
    def scored(self) -> range:
        """Positions of the prompt behind which a token is scored."""
        if self.num_best < 0:
            return _NO_POSITION
        end = min(self.start + self.num_tokens, len(self.sequence.prompt))
        return range(self.start, end)

    @property
    def recorded(self) -> range:
        """Positions of the tokens of which the experts are wanted."""
        if not self.sequence.records:
            return _NO_POSITION
        return range(self.start, self.start + self.num_tokens)


class Place(NamedTuple):
    """Place of what a pass adds to a sequence among the results of the pass."""

    sequence: Sequence
    column: int
    """Lane, or number of lanes plus the chunk, behind the columns of earlier shards."""
    num_new: int
    """New tokens, from the first step on; with drafts the most that may come."""
    scored: range = _NO_POSITION
    """Positions of the prompt behind which the chunk scores a token."""
    recorded: range = _NO_POSITION
    """Positions of the tokens of which the experts are wanted."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """One pass: tokens that the device reads, and places of the results.

    Args:
        number: Number of the pass, from 0 on; passes run in this order.
        size: Shape of the compiled pass on each shard.
        lanes: Decode part; a lane reads up to `size.steps * size.width` tokens.
        chunks: Prompt part.
        tables: int32[max_rows + 1, max_pages] of each shard, pages of each slot; 0, the
            sink, behind the pages of a slot and in the last row. An array is not
            written again, and is the array of the previous plan if no page has changed.
        admitted: Slots of each shard with a new owner; the engine sets the slots before
            the pass, with all tokens that the sequence has.
        places: Places of new tokens, scored tokens and experts in the results; the
            places of a sequence are adjacent, in the order of the tokens.
    """

    number: int
    size: Size
    lanes: Pieces
    chunks: Pieces
    tables: tuple[np.ndarray, ...]
    admitted: tuple[tuple[tuple[int, Sequence], ...], ...]
    places: tuple[Place, ...]


def lay_tasks(
    shards: List[List[Task]],
    num_pieces: int,
    no_slot: int,
    num_drafts: int = 0,
    *,
    records: bool = False,
) -> Pieces:
    """Lays the tasks of each shard into the arrays of a pass, in order."""
    tasks = [task for each in shards for task in each]
    places = [
        shard * num_pieces + number
        for shard, each in enumerate(shards)
        for number in range(len(each))
    ]
    num_pieces *= len(shards)
    slots = np.full(num_pieces, no_slot, np.int32)
    starts, counts = np.zeros((2, num_pieces), np.int32)
    ends = np.zeros(num_pieces, bool)
    drafts = np.zeros((num_pieces, num_drafts), np.int32)
    num_best = np.full(num_pieces, -1, np.int32)
    slots[places] = [task.slot for task in tasks]
    starts[places] = [task.start for task in tasks]
    counts[places] = [task.num_tokens for task in tasks]
    ends[places] = [task.num_new > 0 for task in tasks]
    num_best[places] = [task.num_best for task in tasks]
    for place, task in zip(places, tasks, strict=True) if num_drafts else ():
        drafts[place, : len(task.drafts)] = task.drafts
    scores = any(task.num_best >= 0 for task in tasks)
    recorded = np.zeros(num_pieces, bool)
    recorded[places] = [task.sequence.records for task in tasks]
    optional = num_best if scores else None, recorded if records else None
    return Pieces(slots, starts, counts, ends, drafts, *optional)


def lay_plan(
    number: int,
    size: Size,
    *,
    lanes: List[List[Task]],
    chunks: List[List[Task]],
    tables: List[np.ndarray],
    admitted: List[List[Sequence]] = (),
) -> Plan:
    """Lays the tasks of all shards into the arrays of a pass."""
    no_slot = len(tables[0]) - 1
    tasks = itertools.chain(*lanes, *chunks)
    records = any(task.sequence.records for task in tasks)
    return Plan(
        number=number,
        size=size,
        lanes=lay_tasks(lanes, size.lanes, no_slot, size.width - 1, records=records),
        chunks=lay_tasks(chunks, size.chunks, no_slot, records=records),
        tables=tuple(tables),
        admitted=tuple(
            tuple((x.slot, x) for x in each if x.slot is not None) for each in admitted
        ),
        places=find_places(lanes, chunks, size),
    )


def find_places(
    lanes: List[List[Task]], chunks: List[List[Task]], size: Size
) -> tuple[Place, ...]:
    """Returns the places of all new tokens, scored tokens and experts."""
    num_columns = size.lanes + size.chunks
    columns = [
        column
        for shard, each in enumerate(zip(lanes, chunks, strict=True))
        for tasks, first in zip(each, (0, size.lanes), strict=True)
        for column in enumerate(tasks, start=shard * num_columns + first)
    ]
    return tuple(
        Place(task.sequence, column, task.num_new, task.scored, task.recorded)
        for column, task in columns
        if task.num_new or task.scored or task.recorded
    )
