"""Continuous batching: which sequences read which tokens in the next pass.

Every pass continues all running sequences by a token. Chunks of prompts, first come
first served, fill a fixed budget of tokens. Passes are planned ahead of results, but
for passes with drafts: drafts follow a token that the host knows, and how many are
right decides where the next pass begins.

Data shards have rows and pages apart, and read each pass together: its size holds the
shard with the most to read. A sequence waits in one queue for all shards.
"""

import bisect
import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from zjax.errors import ConfigError, Problem
from zjax.generation.balance import rank_shards
from zjax.generation.drafts import Speculator
from zjax.generation.plan import CHUNK_SIZE, Place, Plan, Size, Task, lay_plan
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
    """State and totals of a scheduler, of all shards together."""

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
        pools: Pages of the cache of each data shard, 1 pool or more.
        max_rows: Most sequences with a slot on a shard.
        max_length: Most tokens of a prompt with the continuation.
        sizes: Shapes of compiled passes on a shard; one with chunks has `max_rows`
            lanes or more. Sizes of one width above 1 are for passes with drafts.
        chunk_size: Tokens of a chunk.

    Raises:
        ConfigError: Names a setting that no sequence could run with.

    Example:
        >>> scheduler = Scheduler([Pool(8, 4)], 2, 16, [Size(2, 1)], chunk_size=4)
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
        pools: Iterable[Pool],
        max_rows: int,
        max_length: int,
        sizes: Iterable[Size],
        *,
        chunk_size: int = CHUNK_SIZE,
    ):
        self.sizes, self.max_length = tuple(sizes), max_length
        self.chunk_size = chunk_size
        widest = max((size.lanes for size in self.sizes if size.chunks), default=0)
        if widest < max_rows:
            problem = f"is more than the {widest} lanes of a pass with chunks"
            remedy = "add a larger size, or use fewer rows"
            raise ConfigError(Problem("max_rows", max_rows, problem, remedy))
        num_ahead = max(size.num_ahead(chunk_size) for size in self.sizes)
        limits = max_rows, max_length, num_ahead
        self.shards = tuple(Slots(pool, *limits) for pool in pools)
        self.max_rows = max_rows
        self.waiting: list[Sequence] = []
        # The shard that each sequence chose, and the page that it awaits there.
        self._promises: dict[Sequence, tuple[int, bytes]] = {}
        self._num_arrived = self._num_plans = self._num_accepted = 0
        self._num_preemptions = self._num_drafts = self._num_accepted_drafts = 0
        self._awaits_drafts = False
        width = max((size.width for size in self.sizes), default=1)
        self.speculator = Speculator(width - 1)

    @property
    def metrics(self) -> Metrics:
        """State and totals."""
        return Metrics(
            num_running=sum(len(slots.running) for slots in self.shards),
            num_waiting=len(self.waiting),
            num_live_pages=sum(slots.pool.num_live for slots in self.shards),
            num_cached_pages=sum(slots.pool.num_cached for slots in self.shards),
            num_hit_tokens=sum(slots.num_hit_tokens for slots in self.shards),
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
        lanes = [*map(self._reserve_lanes, self.shards)]
        chunks, admitted = self._read_prompts(max(map(len, lanes)))
        if not any(lanes) and not any(chunks):
            return None
        speculates = not any(chunks) and self._drafts_pay(lanes)
        if speculates and self._num_accepted < self._num_plans:
            return None
        propose = self.speculator.propose if speculates else _propose_nothing
        drafts = [[*map(propose, each)] for each in lanes]
        self._awaits_drafts = any(map(any, drafts))
        size = self._find_size(lanes, chunks, has_drafts=self._awaits_drafts)
        pairs = zip(lanes, drafts, strict=True)
        plan = lay_plan(
            self._num_plans,
            size,
            lanes=[[*self._take_tokens(*pair, size.steps)] for pair in pairs],
            chunks=chunks,
            tables=[slots.lend_table() for slots in self.shards],
            admitted=admitted,
        )
        self._num_plans += 1
        # Only now, so that pages are found by later passes alone.
        for task in itertools.chain(*chunks):
            self.shards[task.sequence.shard].publish(task.sequence)
        return plan

    def accept(self, plan: Plan, tokens: np.ndarray) -> list[Result]:
        """Hands the results of the oldest pass to sequences that have not ended.

        Args:
            plan: The pass; passes are accepted in order.
            tokens: int[steps * width, shards * (lanes + chunks)], the new tokens, shard
                by shard; -1 behind the first wrong draft.

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
            gives = num_pending or places[0].scored
            if sequence.finish_reason is not None or not gives:
                continue
            sequence.num_pending -= num_pending
            scored = _take_scores(places, plan.size) if places[0].scored else ()
            added = sequence.append(new)
            results.append(Result(sequence, column, added, tuple(scored)))
            if sequence.slot is not None:
                # Keys of rejected drafts are written again.
                sequence.num_planned -= num_pending - len(new)
                self.shards[sequence.shard].publish(sequence)
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
        slots = self.shards[0]
        pool = slots.pool
        num_pages = slots.most_pages(num_prompt + max(num_new - 1, 0))
        if num_pages >= pool.num_pages:  # one is the sink
            problem = f"after {num_prompt} tokens needs {num_pages} pages of "
            problem += f"{pool.page_size} tokens, and the cache has "
            problem += f"{pool.num_pages - 1}"
            remedy = "shorten the prompt, or enlarge the cache"
            remedy = f"ask for fewer, {remedy}" if num_new > 1 else remedy
            yield Problem("max_new_tokens", num_new, problem, remedy)

    def _reserve_lanes(self, slots: Slots) -> list[Sequence]:
        """Holds the pages of what each sequence reads next; returns those that decode.

        Oldest first: if pages run out, the youngest sequences of the shard go back to
        the queue. The oldest is never among these: it gets every page if need be, so
        that it ends.
        """
        lanes = []
        slots.free_behind()
        for sequence in [*slots.running]:
            while sequence.slot is not None and not slots.hold_next(sequence):
                self._preempt(slots.running[-1])
            if sequence.is_decoding:
                lanes.append(sequence)
        return lanes

    def _fills(self, lanes: list[list[Sequence]], num_steps: int) -> bool:
        """Whether pages suffice for some steps, and most of them are of use.

        The steps of a lane behind the last token of the sequence are of no use. Streams
        want each token as soon as it is there.
        """
        if any(sequence.is_streamed for each in lanes for sequence in each):
            return False
        num_used = num_lanes = 0
        for slots, sequences in zip(self.shards, lanes, strict=True):
            counts = [min(num_steps, sequence.num_left) for sequence in sequences]
            num_missing = sum(map(slots.num_missing, sequences, counts))
            if num_missing > slots.pool.num_available:
                return False
            num_used, num_lanes = num_used + sum(counts), num_lanes + len(counts)
        return num_used >= _USEFUL * num_steps * num_lanes

    def _drafts_pay(self, lanes: list[list[Sequence]]) -> bool:
        """Whether a pass of all lanes with drafts is expected to be faster."""
        most = max(map(len, lanes))
        has_size = any(x.width > 1 and x.lanes >= most for x in self.sizes)
        return has_size and self.speculator.pays([*itertools.chain(*lanes)])

    def _take_tokens(
        self, lanes: list[Sequence], drafts: list[list[int]], num_steps: int
    ) -> Iterator[Task]:
        """Yields the tokens that each lane reads, and counts them as planned."""
        for sequence, proposed in zip(lanes, drafts, strict=True):
            slots = self.shards[sequence.shard]
            count = min(num_steps + len(proposed), sequence.num_left)
            if count > 1 and not slots.grow(sequence, count):  # then no drafts
                count = 1
            assert sequence.slot is not None
            place = sequence, sequence.slot, sequence.num_planned
            yield Task(*place, count, count, proposed[: count - 1])
            sequence.num_planned += count
            sequence.num_pending += count

    def _read_prompts(
        self, num_lanes: int
    ) -> tuple[list[list[Task]], list[list[Sequence]]]:
        """Fills the chunks of a pass, first come first served.

        Returns the chunks of each shard, and the sequences that got a slot there.
        """
        most = max(size.chunks for size in self.sizes if size.lanes >= num_lanes)
        chunks: list[list[Task]] = [[] for _ in self.shards]
        for slots, found in zip(self.shards, chunks, strict=True):
            for sequence in slots.running:
                found += self._take_chunks(sequence, most - len(found))
        admitted: list[list[Sequence]] = [[] for _ in self.shards]
        num_rows, passed = [len(slots.running) for slots in self.shards], []
        share = -(-(sum(num_rows) + len(self.waiting)) // len(self.shards))
        for sequence in self.waiting:
            if min(num_rows) >= self.max_rows:  # with rows that await pages
                break
            num_free = [most - len(found) for found in chunks]
            shard, is_admitted = self._find_shard(sequence, num_free, num_rows, share)
            if shard is None:
                break
            num_rows[shard] += 1
            if not is_admitted:
                passed.append(sequence)
                continue
            admitted[shard].append(sequence)
            chunks[shard] += self._take_chunks(sequence, most - len(chunks[shard]))
        num_passed = len(passed) + sum(map(len, admitted))
        self.waiting[:num_passed] = passed
        return chunks, admitted

    def _find_shard(
        self, sequence: Sequence, num_free: list[int], num_rows: list[int], share: int
    ) -> tuple[int | None, bool]:
        """Returns the shard of a waiting sequence, and whether it has a slot there now.

        A sequence whose pages a running sequence is still to publish waits for these.
        Samples of one prompt so read the pages of the first. A sequence chooses once
        which pages to await, so that it does not wait for ever. The shard is None if
        the sequence fits nowhere, and nobody behind it is to pass it. `num_free` are
        the chunks that the pass has left on each shard.
        """
        shard, promise = self._promises.get(sequence, (0, b""))
        if self.shards[shard].is_promised(promise):
            return shard, False
        is_open = [
            number > 0 and not slots.is_full
            for number, slots in zip(num_free, self.shards, strict=True)
        ]
        if not any(is_open) or sequence.num_pending:
            return None, False
        ranked = rank_shards(sequence, self.shards, num_rows, share)
        if sequence not in self._promises:
            promise = self.shards[ranked[0]].find_promise(sequence)
            self._promises[sequence] = ranked[0], promise
            if promise:
                return ranked[0], False
        for shard in ranked:
            if is_open[shard] and self.shards[shard].admit(sequence):
                sequence.shard = shard
                del self._promises[sequence]
                return shard, True
        return None, False

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

    def _preempt(self, sequence: Sequence) -> None:
        """Takes the pages of a sequence, which reads all tokens again later.

        Tokens on the way are still accepted; the sequence waits until all are there.
        """
        self._num_preemptions += 1
        self.shards[sequence.shard].leave(sequence)
        bisect.insort(self.waiting, sequence, key=operator.attrgetter("arrival"))

    def _remove(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
            self._promises.pop(sequence, None)
        else:
            self.shards[sequence.shard].leave(sequence)

    def _find_size(
        self,
        lanes: list[list[Sequence]],
        chunks: list[list[Task]],
        *,
        has_drafts: bool,
    ) -> Size:
        """Returns the size with the fewest tokens that holds a pass of all shards.

        Of equal sizes, the one with the most steps that the lanes fill.
        """

        def cost(size: Size) -> tuple[int, bool, int]:
            is_filled = size.steps == 1 or self._fills(lanes, size.steps)
            return size.num_tokens(self.chunk_size), not is_filled, -size.steps

        num_lanes, num_chunks = max(map(len, lanes)), max(map(len, chunks))
        fits = [
            size
            for size in self.sizes
            if size.lanes >= num_lanes
            and size.chunks >= num_chunks
            and (size.width > 1) == has_drafts
            and (size.steps == 1 or not num_chunks)
        ]
        return min(fits, key=cost)


def _take_scores(places: Iterable[Place], size: Size) -> list[tuple[int, slice]]:
    """Returns the chunks of a sequence with the tokens that have new scores."""
    found = []
    for place in places:
        new = place.sequence.add_scores(place.scored)
        # Behind the last token of the prompt stands a token of the text.
        end = min(new.stop, len(place.sequence.prompt) - 1)
        start, chunk = place.scored.start, size.chunk_at(place.column)
        found.append((chunk, slice(new.start - start, end - start)))
    return found


def _propose_nothing(sequence: Sequence) -> list[int]:
    """Returns no drafts."""
    del sequence
    return []
