"""Continuous batching: which sequences read which tokens in the next pass.

Every pass continues all running sequences by a token. Chunks of prompts, first come
first served, fill a fixed budget of tokens. Passes are planned ahead of results, but
for passes with drafts: drafts follow a token that the host knows, and how many are
right decides where the next pass begins.
"""

import bisect
import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from zjax.errors import ConfigError, Problem
from zjax.generation.drafts import Speculator
from zjax.generation.plan import Place, Plan, Size, Task, find_places, lay_tasks
from zjax.generation.pool import Pool
from zjax.generation.sequence import Sequence
from zjax.generation.slots import Slots

_USEFUL = 7 / 8
"""Least share of the steps of lanes that yield a wanted token."""


class Result(NamedTuple):
    """New tokens and scores of a sequence."""

    sequence: Sequence
    column: int
    """Column of the tokens in the results of the pass, from the first step on."""
    tokens: list[int]
    """Up to the end of the sequence: later tokens of the column mean nothing."""
    scored: tuple[tuple[int, slice], ...] = ()
    """Chunks of the pass, with the tokens of each behind which the prompt goes on with
    a token that had no score."""


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
    num_drafts: int
    """Drafts that passes have read, so far."""
    num_accepted_drafts: int
    """Drafts that were right, so far."""


class Scheduler:
    """Chooses the tokens of each pass, and hands results to sequences.

    Args:
        pool: Pages of the cache.
        max_rows: Most sequences with a slot on the device.
        max_length: Most tokens of a prompt with the continuation.
        sizes: Shapes of compiled passes; one with chunks has `max_rows` lanes or more.
            Sizes of one width above 1 are for passes with drafts.
        chunk_size: Tokens of a chunk.

    Raises:
        ConfigError: Names a setting that no sequence could run with.

    Example:
        >>> scheduler = Scheduler(Pool(8, 4), 2, 16, [Size(2, 1)], chunk_size=4)
        >>> sequence = scheduler.add(Sequence([5, 6, 7], max_new_tokens=2))
        >>> plan = scheduler.plan()
        >>> plan.chunks.counts.tolist(), plan.chunks.ends.tolist()
        ([3], [True])
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
    ):
        self.sizes, self.max_length = tuple(sizes), max_length
        self.chunk_size = chunk_size
        widest = max((size.lanes for size in self.sizes if size.chunks), default=0)
        if widest < max_rows:
            problem = f"is more than the {widest} lanes of a pass with chunks"
            remedy = "add a larger size, or use fewer rows"
            raise ConfigError(Problem("max_rows", max_rows, problem, remedy))
        self.slots = Slots(pool, max_rows, max_length)
        self.waiting: list[Sequence] = []
        self._promises: dict[Sequence, bytes] = {}
        self._num_arrived = self._num_plans = self._num_accepted = 0
        self._num_preemptions = self._num_drafts = self._num_accepted_drafts = 0
        self._awaits_drafts = False
        width = max((size.width for size in self.sizes), default=1)
        self.speculator = Speculator(width - 1)

    @property
    def metrics(self) -> Metrics:
        """State and totals."""
        return Metrics(
            num_running=len(self.slots.running),
            num_waiting=len(self.waiting),
            num_live_pages=self.slots.pool.num_live,
            num_cached_pages=self.slots.pool.num_cached,
            num_hit_tokens=self.slots.num_hit_tokens,
            num_preemptions=self._num_preemptions,
            num_drafts=self._num_drafts,
            num_accepted_drafts=self._num_accepted_drafts,
        )

    def add(self, sequence: Sequence) -> Sequence:
        """Queues a sequence.

        Raises:
            ConfigError: The sequence could never run, even alone.
        """
        if problems := [*self.find_problems(sequence)]:
            raise ConfigError(*problems)
        sequence.arrival = self._num_arrived
        self._num_arrived += 1
        self.waiting.append(sequence)
        return sequence

    def plan(self) -> Plan | None:
        """Plans the next pass, which has to run; None if nothing can be read.

        None with sequences still there means that results have to be accepted first.
        """
        if self._awaits_drafts:
            return None
        lanes = self._reserve_lanes()
        chunks, admitted = self._read_prompts(len(lanes))
        if not lanes and not chunks:
            return None
        speculates = not chunks and self._drafts_pay(lanes)
        if speculates and self._num_accepted < self._num_plans:
            return None
        drafts = [self.speculator.propose(x) if speculates else [] for x in lanes]
        self._awaits_drafts = any(drafts)
        size = self._find_size(lanes, len(chunks), has_drafts=any(drafts))
        tasks = [*self._take_tokens(lanes, size.steps, drafts)]
        no_slot = self.slots.max_rows
        plan = Plan(
            number=self._num_plans,
            size=size,
            lanes=lay_tasks(tasks, size.lanes, no_slot, size.width - 1),
            chunks=lay_tasks(chunks, size.chunks, no_slot),
            table=self.slots.lend_table(),
            admitted=tuple((x.slot, x) for x in admitted if x.slot is not None),
            places=find_places(tasks, chunks, size.lanes),
        )
        self._num_plans += 1
        # Only now, so that pages are found by later passes alone.
        for task in chunks:
            self.slots.publish(task.sequence)
        return plan

    def accept(self, plan: Plan, tokens: np.ndarray) -> list[Result]:
        """Hands the results of the oldest pass to sequences that have not ended.

        Args:
            plan: The pass; passes are accepted in order.
            tokens: int[steps * width, lanes + chunks], the new tokens; -1 behind the
                first wrong draft.

        Returns:
            New tokens and scores of each sequence.
        """
        assert plan.number == self._num_accepted, "passes are accepted in order"
        self._num_accepted += 1
        self._awaits_drafts = False
        columns = np.asarray(tokens).T.tolist()
        results = []
        for sequence, group in itertools.groupby(plan.places, lambda x: x.sequence):
            places = [*group]
            column, num_pending = places[-1].column, places[-1].num_new
            new = [token for token in columns[column][:num_pending] if token >= 0]
            if plan.size.width > 1:
                self._num_drafts += num_pending - 1
                self._num_accepted_drafts += len(new) - 1
            if sequence.finish_reason is not None:
                continue
            sequence.num_pending -= num_pending
            scored = _take_scores(places, plan.size.lanes) if places[0].scored else ()
            added = sequence.append(new)
            results.append(Result(sequence, column, added, tuple(scored)))
            if sequence.slot is not None:
                # Keys of rejected drafts are written again.
                sequence.num_planned -= num_pending - len(new)
                self.slots.publish(sequence)
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

    def find_problems(self, sequence: Sequence) -> Iterator[Problem]:
        """Yields the reasons why a sequence could never run."""
        num_prompt, num_new = len(sequence.prompt), sequence.max_new_tokens
        if num_prompt == 0:
            yield Problem("prompt", [], "has no token", "give one token or more")
        if num_new < 1 and sequence.prompt_logprobs is None:
            yield Problem("max_new_tokens", num_new, "is below 1", "ask for 1 or more")
        if num_prompt + num_new > self.max_length:
            problem = f"after {num_prompt} tokens is more than {self.max_length}"
            remedy = f"ask for {max(self.max_length - num_prompt, 0)} or fewer"
            remedy += ", or shorten the prompt"
            yield Problem("max_new_tokens", num_new, problem, remedy)
        # The last token is not read, unless it is of the prompt.
        num_pages = self.slots.num_pages(num_prompt + max(num_new - 1, 0))
        pool = self.slots.pool
        if num_pages >= pool.num_pages:  # one is the sink
            problem = f"after {num_prompt} tokens needs {num_pages} pages of "
            problem += f"{pool.page_size} tokens, and the cache has "
            problem += f"{pool.num_pages - 1}"
            remedy = "shorten the prompt, or enlarge the cache"
            remedy = f"ask for fewer, {remedy}" if num_new > 1 else remedy
            yield Problem("max_new_tokens", num_new, problem, remedy)

    def _reserve_lanes(self) -> list[Sequence]:
        """Holds a page for one more token of each decoding sequence, oldest first.

        If pages run out, the youngest sequences go back to the queue. The oldest is
        never among these: it gets every page if need be, so that it ends.
        """
        lanes = []
        for sequence in [x for x in self.slots.running if x.is_decoding]:
            while sequence.slot is not None and not self.slots.grow(sequence, 1):
                self._preempt(self.slots.running[-1])
            if sequence.slot is not None:
                lanes.append(sequence)
        return lanes

    def _fills(self, lanes: list[Sequence], num_steps: int) -> bool:
        """Whether pages suffice for some steps, and most of them are of use.

        The steps of a lane behind the last token of the sequence are of no use. Streams
        want each token as soon as it is there.
        """
        if any(sequence.is_streamed for sequence in lanes):
            return False
        counts = [min(num_steps, sequence.num_left) for sequence in lanes]
        num_missing = sum(map(self.slots.num_missing, lanes, counts))
        is_used = sum(counts) >= _USEFUL * num_steps * len(lanes)
        return is_used and num_missing <= self.slots.pool.num_available

    def _drafts_pay(self, lanes: list[Sequence]) -> bool:
        """Whether a pass of all lanes with drafts is expected to be faster."""
        has_size = any(x.width > 1 and x.lanes >= len(lanes) for x in self.sizes)
        return has_size and self.speculator.pays(lanes)

    def _take_tokens(
        self, lanes: list[Sequence], num_steps: int, drafts: list[list[int]]
    ) -> Iterator[Task]:
        """Yields the tokens that each lane reads, and counts them as planned."""
        for sequence, proposed in zip(lanes, drafts, strict=True):
            count = min(num_steps + len(proposed), sequence.num_left)
            if count > 1 and not self.slots.grow(sequence, count):  # then no drafts
                count = 1
            assert sequence.slot is not None
            place = sequence, sequence.slot, sequence.num_planned
            yield Task(*place, count, count, proposed[: count - 1])
            sequence.num_planned += count
            sequence.num_pending += count

    def _read_prompts(self, num_lanes: int) -> tuple[list[Task], list[Sequence]]:
        """Fills the chunks of a pass, first come first served.

        Returns the chunks, and the sequences that got a slot.
        """
        most = max(size.chunks for size in self.sizes if size.lanes >= num_lanes)
        chunks = []
        for sequence in self.slots.running:
            chunks += self._take_chunks(sequence, most - len(chunks))
        admitted, passed = [], []
        for sequence in self.waiting:
            if len(chunks) == most or self.slots.is_full or sequence.num_pending:
                break
            if self._awaits_pages(sequence):
                passed.append(sequence)
                continue
            if not self.slots.admit(sequence):
                break
            self._promises.pop(sequence)
            admitted.append(sequence)
            chunks += self._take_chunks(sequence, most - len(chunks))
        self.waiting[: len(passed) + len(admitted)] = passed
        return chunks, admitted

    def _take_chunks(self, sequence: Sequence, most: int) -> Iterator[Task]:
        """Yields the next chunks of a prompt, and counts the tokens as planned."""
        while most and sequence.is_reading:
            assert sequence.slot is not None
            start = sequence.num_planned
            count = min(self.chunk_size, sequence.num_to_read - start)
            sequence.num_planned += count
            is_last = not sequence.is_reading and sequence.max_new_tokens > 0
            sequence.num_pending = int(is_last)
            task = Task(sequence, sequence.slot, start, count, sequence.num_pending)
            if not sequence.is_scored and start + count > sequence.num_scored:
                task = task._replace(num_best=sequence.prompt_logprobs)
            yield task
            most -= 1

    def _awaits_pages(self, sequence: Sequence) -> bool:
        """Whether a running sequence is still to publish pages of a waiting sequence.

        Samples of one prompt so read the pages of the first. A sequence chooses once
        which pages to await, so that it does not wait for ever.
        """
        if sequence not in self._promises:
            self._promises[sequence] = self.slots.find_promise(sequence)
        return self.slots.is_promised(self._promises[sequence])

    def _preempt(self, sequence: Sequence) -> None:
        """Takes the pages of a sequence, which reads all tokens again later.

        Tokens on the way are still accepted; the sequence waits until all are there.
        """
        self._num_preemptions += 1
        self.slots.leave(sequence)
        bisect.insort(self.waiting, sequence, key=operator.attrgetter("arrival"))

    def _remove(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
            self._promises.pop(sequence, None)
        else:
            self.slots.leave(sequence)

    def _find_size(
        self, lanes: list[Sequence], num_chunks: int, *, has_drafts: bool
    ) -> Size:
        """Returns the size with the fewest tokens that holds a pass.

        Of equal sizes, the one with the most steps that the lanes fill.
        """

        def cost(size: Size) -> tuple[int, bool, int]:
            is_filled = size.steps == 1 or self._fills(lanes, size.steps)
            return size.num_tokens(self.chunk_size), not is_filled, -size.steps

        fits = [
            size
            for size in self.sizes
            if size.lanes >= len(lanes)
            and size.chunks >= num_chunks
            and (size.width > 1) == has_drafts
            and (size.steps == 1 or not num_chunks)
        ]
        return min(fits, key=cost)


def _take_scores(places: Iterable[Place], num_lanes: int) -> list[tuple[int, slice]]:
    """Returns the chunks of a sequence with the tokens that have new scores."""
    found = []
    for place in places:
        new = place.sequence.add_scores(place.scored)
        # Behind the last token of the prompt stands a token of the text.
        end = min(new.stop, len(place.sequence.prompt) - 1)
        start = place.scored.start
        found.append((place.column - num_lanes, slice(new.start - start, end - start)))
    return found
