"""Continuous batching: which sequences read which tokens in the next pass.

Every pass continues all running sequences by a token, and fills the rest of a fixed
budget of tokens with prompts, first come first served, in chunks.

Passes run in the order of plans, and plans do not wait for results. So the pages of a
sequence that ends are free at once: a pass that still writes the pages runs before any
pass of a new owner. Such a pass writes only behind the tokens that the host knows, and
a published page has known tokens alone.
"""

import bisect
import operator
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from zjax.errors import ConfigError, Problem
from zjax.generation.plan import (
    Plan,
    Size,
    Task,
    find_places,
    lay_chunks,
    lay_lanes,
)
from zjax.generation.pool import Pool
from zjax.generation.sequence import Sequence

_USEFUL = 7 / 8
"""Least share of the steps of lanes that yield a wanted token."""
_by_arrival = operator.attrgetter("arrival")


class Result(NamedTuple):
    """New tokens of a sequence."""

    sequence: Sequence
    column: int
    """Column of the tokens in the results of the pass, from the first step on."""
    tokens: list[int]
    """Up to the end of the sequence: later tokens of the column mean nothing."""


class Metrics(NamedTuple):
    """State and totals of a scheduler."""

    num_running: int
    num_waiting: int
    num_live_pages: int
    num_cached_pages: int
    num_hit_tokens: int
    """Prompt tokens that were found in the cache, so far."""
    num_preemptions: int
    """Sequences that gave their pages to older ones, so far."""


class Scheduler:
    """Chooses the tokens of each pass, and hands results to sequences.

    Args:
        pool: Pages of the cache.
        max_rows: Most sequences with a slot on the device.
        max_length: Most tokens of a prompt with the continuation.
        sizes: Shapes of compiled passes; one with chunks has `max_rows` lanes or more.
        chunk_size: Tokens of a chunk.
        max_steps: Most tokens that a lane reads in a pass without chunks; a pass has a
            power of two of steps.

    Raises:
        ConfigError: Names a setting that no sequence could run with.

    Example:
        >>> scheduler = Scheduler(Pool(8, 4), 2, 16, [Size(2, 1)], chunk_size=4)
        >>> sequence = scheduler.add(Sequence([5, 6, 7], max_new_tokens=2))
        >>> plan = scheduler.plan()
        >>> plan.size, plan.chunks.tokens.tolist(), plan.chunks.ends.tolist()
        (Size(lanes=2, chunks=1), [[5, 6, 7, 0]], [True])
        >>> ahead = scheduler.plan()  # the token is on the device
        >>> ahead.lanes.starts.tolist(), ahead.lanes.counts.tolist()
        ([3, 0], [1, 0])
        >>> _ = scheduler.accept(plan, np.array([[0, 0, 8]]))
        >>> _ = scheduler.accept(ahead, np.array([[9, 0]]))
        >>> sequence.generated, sequence.finish_reason
        ([8, 9], 'length')

    Reference:
        Holmes et al., DeepSpeed-FastGen (arXiv:2401.08671).
    """

    def __init__(
        self,
        pool: Pool,
        max_rows: int,
        max_length: int,
        sizes: Iterable[Size],
        *,
        chunk_size: int = 64,
        max_steps: int = 8,
    ):
        self.pool, self.sizes = pool, tuple(sizes)
        self.max_rows, self.max_length = max_rows, max_length
        self.chunk_size, self.max_steps = chunk_size, max_steps
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        widest = max((size.lanes for size in self.sizes if size.chunks), default=0)
        if widest < max_rows:
            problem = f"is more than the {widest} lanes of a pass with chunks"
            remedy = "add a larger size, or use fewer rows"
            raise ConfigError(Problem("max_rows", max_rows, problem, remedy))
        max_pages = -(-max_length // pool.page_size)
        self._table = np.zeros((max_rows + 1, max_pages), np.int32)
        self._is_table_read = False
        self._slots = list(range(max_rows - 1, -1, -1))
        self._expected: set[bytes] = set()
        self._awaited: dict[Sequence, bytes] = {}
        self._num_arrived = self._num_plans = self._num_accepted = 0
        self._num_hit_tokens = self._num_preemptions = 0

    @property
    def metrics(self) -> Metrics:
        """State and totals."""
        return Metrics(
            len(self.running),
            len(self.waiting),
            self.pool.num_live,
            self.pool.num_cached,
            self._num_hit_tokens,
            self._num_preemptions,
        )

    def add(self, sequence: Sequence) -> Sequence:
        """Queues a sequence.

        Raises:
            ConfigError: The sequence could never run, even alone.
        """
        problems = [*self._find_problems(sequence)]
        if problems:
            raise ConfigError(*problems)
        sequence.arrival = self._num_arrived
        self._num_arrived += 1
        self.waiting.append(sequence)
        return sequence

    def plan(self) -> Plan | None:
        """Plans the next pass, which has to run; None if nothing can be read.

        None with sequences still there means that results have to be accepted first.
        """
        lanes = self._reserve_lanes()
        chunks, admitted = self._read_prompts(len(lanes))
        num_steps = 1 if chunks else self._extend_lanes(lanes)
        if not lanes and not chunks:
            return None
        size = self._find_size(len(lanes), len(chunks))
        lane_tasks = [*self._take_steps(lanes, num_steps)]
        plan = Plan(
            number=self._num_plans,
            size=size,
            num_steps=num_steps,
            lanes=lay_lanes(lane_tasks, size.lanes, self.max_rows),
            chunks=lay_chunks(chunks, size.chunks, self.chunk_size, self.max_rows),
            table=self._table,
            admitted=tuple((x.slot, x) for x in admitted if x.slot is not None),
            places=find_places(lane_tasks, chunks, size.lanes),
        )
        self._num_plans += 1
        self._is_table_read = True
        # Only now, so that pages are found by later passes alone.
        for task in chunks:
            self._publish(task.sequence)
        return plan

    def accept(self, plan: Plan, tokens: np.ndarray) -> list[Result]:
        """Hands the results of the oldest pass to sequences that have not ended.

        Args:
            plan: The pass; passes are accepted in order.
            tokens: int[num_steps, lanes + chunks], the new tokens.

        Returns:
            New tokens of each sequence.
        """
        assert plan.number == self._num_accepted, "passes are accepted in order"
        self._num_accepted += 1
        columns = np.asarray(tokens).T.tolist()
        results = []
        for sequence, column, num_new in plan.places:
            if sequence.finish_reason is not None:
                continue
            sequence.num_pending -= num_new
            added = sequence.append(columns[column][:num_new])
            results.append(Result(sequence, column, added))
            if sequence.slot is not None:
                self._publish(sequence)
            if sequence.finish_reason is not None:
                self._remove(sequence)
        return results

    def finish(self, sequence: Sequence, reason: str) -> None:
        """Ends a sequence that has not ended; results on the way are ignored."""
        if sequence.finish_reason is None:
            sequence.finish_reason = reason
            self._remove(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Ends a sequence that nobody wants any more."""
        self.finish(sequence, "abort")

    def _find_problems(self, sequence: Sequence) -> Iterator[Problem]:
        """Yields the reasons why a sequence could never run."""
        num_prompt, num_new = len(sequence.prompt), sequence.max_new_tokens
        if num_prompt == 0:
            yield Problem("prompt", [], "has no token", "give one token or more")
        if num_new < 1:
            yield Problem("max_new_tokens", num_new, "is below 1", "ask for 1 or more")
        if num_prompt + num_new > self.max_length:
            problem = f"after {num_prompt} tokens is more than {self.max_length}"
            remedy = f"ask for {max(self.max_length - num_prompt, 0)} or fewer"
            remedy += ", or shorten the prompt"
            yield Problem("max_new_tokens", num_new, problem, remedy)
        # The last token is not read.
        num_pages = self._num_pages(num_prompt + num_new - 1)
        num_usable = self.pool.num_pages - 1
        if num_pages > num_usable:
            problem = f"after {num_prompt} tokens needs {num_pages} pages of "
            problem += f"{self.pool.page_size} tokens, and the cache has {num_usable}"
            remedy = "ask for fewer, shorten the prompt, or enlarge the cache"
            yield Problem("max_new_tokens", num_new, problem, remedy)

    def _num_pages(self, num_tokens: int) -> int:
        """Counts the pages of a number of tokens."""
        return -(-num_tokens // self.pool.page_size)

    def _reserve_lanes(self) -> list[Sequence]:
        """Holds a page for one more token of each decoding sequence, oldest first.

        If pages run out, the youngest sequences go back to the queue. The oldest is
        never among these: it has every page if need be, so that it ends.
        """
        lanes = []
        for sequence in [x for x in self.running if x.is_decoding]:
            while sequence.slot is not None and not self._grow(sequence, 1):
                self._preempt(self.running[-1])
            if sequence.slot is not None:
                lanes.append(sequence)
        return lanes

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Holds pages for more tokens of a sequence; False if too few are available."""
        num_held = len(sequence.pages)
        num_pages = self._num_pages(sequence.num_planned + num_tokens)
        pages = self.pool.allocate(max(num_pages - num_held, 0))
        if pages is None:
            return False
        if pages:
            sequence.pages += pages
            self._write_table(sequence.slot, slice(num_held, num_pages), pages)
        return True

    def _extend_lanes(self, lanes: list[Sequence]) -> int:
        """Holds pages for as many steps as pay; returns the number of steps."""
        num_steps = self.max_steps if not any(x.is_streamed for x in lanes) else 1
        num_steps = 1 << num_steps.bit_length() - 1
        while num_steps > 1 and not self._can_run(lanes, num_steps):
            num_steps //= 2
        for sequence in lanes:
            assert self._grow(sequence, min(num_steps, sequence.num_left))
        return num_steps

    def _can_run(self, lanes: list[Sequence], num_steps: int) -> bool:
        """Whether most of the steps yield a wanted token, and pages suffice."""
        counts = [min(num_steps, sequence.num_left) for sequence in lanes]
        num_pages = sum(
            max(self._num_pages(x.num_planned + count) - len(x.pages), 0)
            for x, count in zip(lanes, counts, strict=True)
        )
        is_useful = sum(counts) >= _USEFUL * num_steps * len(lanes)
        return is_useful and num_pages <= self.pool.num_available

    def _take_steps(self, lanes: list[Sequence], num_steps: int) -> Iterator[Task]:
        """Yields what each lane reads, and counts it as planned."""
        for sequence in lanes:
            count = min(num_steps, sequence.num_left)
            assert sequence.slot is not None
            yield Task(sequence, sequence.slot, sequence.num_planned, count, count)
            sequence.num_planned += count
            sequence.num_pending += count

    def _read_prompts(self, num_lanes: int) -> tuple[list[Task], list[Sequence]]:
        """Fills the chunks of a pass, first come first served.

        Returns the chunks, and the sequences that got a slot.
        """
        sizes = [size for size in self.sizes if size.lanes >= num_lanes]
        num_free = max(size.chunks for size in sizes)
        chunks = []
        for sequence in self.running:
            chunks += self._take_chunks(sequence, num_free - len(chunks))
        admitted = []
        for sequence in self.waiting:
            if len(chunks) == num_free or not self._slots or sequence.num_pending:
                break
            if self._is_awaiting(sequence):
                continue
            if not self._admit(sequence):
                break
            admitted.append(sequence)
            chunks += self._take_chunks(sequence, num_free - len(chunks))
        if admitted:
            self.waiting = [x for x in self.waiting if x.slot is None]
        return chunks, admitted

    def _take_chunks(self, sequence: Sequence, most: int) -> Iterator[Task]:
        """Yields the next chunks of a prompt, and counts the tokens as planned."""
        while most and sequence.is_reading:
            assert sequence.slot is not None
            start = sequence.num_planned
            count = min(self.chunk_size, sequence.num_to_read - start)
            sequence.num_planned += count
            sequence.num_pending = int(not sequence.is_reading)
            yield Task(sequence, sequence.slot, start, count, sequence.num_pending)
            most -= 1

    def _admit(self, sequence: Sequence) -> bool:
        """Gives a sequence a slot and the pages of all tokens, if enough are available.

        A page for each running sequence is left: else the next pass might preempt
        the sequence that has just been read.
        """
        num_tokens, keys = len(sequence.tokens), sequence.keys(self.pool.page_size)
        # The last token is always read, as it yields the next token.
        matched = self.pool.match(keys[: (num_tokens - 1) // self.pool.page_size])
        num_new = self._num_pages(num_tokens) - len(matched)
        num_taken = num_new + self.pool.count_cached(matched)
        if num_taken + len(self.running) > self.pool.num_available:
            return False
        self.pool.share(matched)
        sequence.pages = [*matched]
        sequence.slot = self._slots.pop()
        self._write_table(sequence.slot, slice(0, len(matched)), matched)
        sequence.num_planned = len(matched) * self.pool.page_size
        sequence.num_to_read, sequence.num_published = num_tokens, len(matched)
        assert self._grow(sequence, num_tokens - sequence.num_planned)
        self._expected.update(keys[len(matched) :])
        self._num_hit_tokens += sequence.num_planned
        self._awaited.pop(sequence, None)
        bisect.insort(self.running, sequence, key=_by_arrival)
        return True

    def _is_awaiting(self, sequence: Sequence) -> bool:
        """Whether a sequence waits for pages that a running sequence will publish.

        A sequence waits so once: afterwards nobody is admitted before it.
        """
        if sequence not in self._awaited:
            keys = sequence.keys(self.pool.page_size)
            keys = keys[: (len(sequence.tokens) - 1) // self.pool.page_size]
            num_found = len(self.pool.match(keys))
            last = b""
            for key in keys[num_found:]:
                if key not in self._expected:
                    break
                last = key
            self._awaited[sequence] = last
        return self._awaited[sequence] in self._expected

    def _publish(self, sequence: Sequence) -> None:
        """Lets prefixes find the pages of which all tokens are known and planned."""
        num_known = min(len(sequence.tokens), sequence.num_planned)
        num_full = num_known // self.pool.page_size
        keys = sequence.keys(self.pool.page_size)
        for number in range(sequence.num_published, num_full):
            self.pool.publish(sequence.pages[number], keys[number])
            self._expected.discard(keys[number])
        sequence.num_published = num_full

    def _preempt(self, sequence: Sequence) -> None:
        """Takes the pages of a sequence, which reads all tokens again later.

        Tokens on the way are still accepted; the sequence waits until all are there.
        """
        self._num_preemptions += 1
        self._leave(sequence)
        bisect.insort(self.waiting, sequence, key=_by_arrival)

    def _remove(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
            self._awaited.pop(sequence, None)
        else:
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Takes slot and pages from a running sequence."""
        assert sequence.slot is not None
        keys = sequence.keys(self.pool.page_size)
        self._expected.difference_update(keys[sequence.num_published :])
        self.pool.release(sequence.pages)
        self._write_table(sequence.slot, slice(None), 0)
        self._slots.append(sequence.slot)
        self.running.remove(sequence)
        sequence.slot, sequence.pages = None, []
        sequence.num_planned = sequence.num_to_read = sequence.num_published = 0

    def _write_table(
        self, slot: int | None, columns: slice, pages: list[int] | int
    ) -> None:
        """Writes pages of a slot, into a copy of a table that a plan has."""
        if self._is_table_read:
            self._table, self._is_table_read = self._table.copy(), False
        self._table[slot, columns] = pages

    def _find_size(self, num_lanes: int, num_chunks: int) -> Size:
        """Returns the size with the fewest tokens that holds a pass."""
        fits = [
            size
            for size in self.sizes
            if size.lanes >= num_lanes and size.chunks >= num_chunks
        ]
        return min(fits, key=lambda size: size.lanes + size.chunks * self.chunk_size)
