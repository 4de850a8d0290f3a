"""A device of NumPy that runs plans of the scheduler literally.

It stores tokens and positions where a model stores keys and values. Every lane and
chunk gathers its whole prefix through the table, or what the window leaves of it,
which must be that of the text: a wrong page, position or order is caught at once. The
next token of a text is a hash of the prefix.
"""

import collections
import dataclasses
import random

import numpy as np

from zjax.generation.plan import Size
from zjax.generation.pool import Pool
from zjax.generation.scheduler import Scheduler
from zjax.generation.sequence import Sequence

SIZES = (Size(2), Size(8), Size(4, 2), Size(8, 6))

MASK = (1 << 64) - 1
FACTOR = 0x9E3779B97F4A7C15
VOCAB = 50


def choose(sum_of_prefix):
    return ((sum_of_prefix * FACTOR & MASK) >> 40) % VOCAB


def continue_text(prompt, num_new):
    """The oracle: a plain loop over one text, which knows no pages and no passes."""
    text, total = list(prompt), 0
    for token in text:
        total = (total * FACTOR + token + 1) & MASK
    for _ in range(num_new):
        text.append(choose(total))
        total = (total * FACTOR + text[-1] + 1) & MASK
    return text[len(prompt) :]


def expect(sequence):
    """The generated tokens and the reason to end."""
    tokens = continue_text(sequence.prompt, sequence.max_new_tokens)
    for number, token in enumerate(tokens):
        if token in sequence.end_ids:
            return tokens[: number + 1], "stop"
    return tokens, "length"


class Device:
    """State of all slots and pages of a shard, changed by passes in order."""

    def __init__(self, num_pages, page_size, max_rows, window=0):
        self.page_size, self.window = page_size, window
        self.tokens = np.full((num_pages, page_size), -1, np.int64)
        self.positions = np.full((num_pages, page_size), -1, np.int64)
        self.last = np.full(max_rows + 1, -1, np.int64)
        self.owners, self.given = {}, {}

    def run(self, plan):
        """Runs the part of a pass that is of one shard.

        Returns int[steps * width, lanes + chunks], -1 where nothing is.
        """
        for slot, sequence in plan.admitted[0]:
            self.last[slot], self.owners[slot] = -1, sequence
            self.given[slot] = [*sequence.tokens]
        num_lanes, num_chunks, width, num_steps = plan.size
        shape = num_steps * width, num_lanes + num_chunks
        results = np.full(shape, -1, np.int64)
        prompts = [[x[i] for x in plan.chunks[:4]] for i in range(num_chunks)]
        for step in range(num_steps):
            live = np.flatnonzero(plan.lanes.counts > step).tolist()
            reads = [self.lane(plan, lane, step) for lane in live]
            for slot, start, count, _ in prompts:
                if count:
                    read = self.given[slot][start : start + count]
                    reads.append((slot, start, read))
            if reads:
                self.write(plan.tables[0], reads)
            for lane, (slot, start, read) in zip(live, reads, strict=False):
                for i, token in enumerate(read):
                    if i and token != self.last[slot]:
                        break  # a draft that is wrong
                    place = slot, start + i
                    self.last[slot] = self.read(plan.tables[0], *place, 1)
                    results[step + i, lane] = self.last[slot]
            for chunk, (slot, start, count, is_last) in enumerate(prompts):
                if count:
                    token = self.read(plan.tables[0], slot, start, count)
                if is_last:
                    results[0, num_lanes + chunk] = self.last[slot] = token
        return results

    def lane(self, plan, lane, step):
        """Slot, position and tokens that a lane reads in a step."""
        slot, start, count = (int(x[lane]) for x in plan.lanes[:3])
        if plan.size.width == 1:
            return slot, start + step, [self.last[slot]]
        drafts = plan.lanes.drafts[lane, : count - 1].tolist()
        return slot, start, [self.last[slot], *drafts]

    def write(self, table, reads):
        places = [
            (table[slot, position // self.page_size], position % self.page_size)
            for slot, start, read in reads
            for position in range(start, start + len(read))
        ]
        assert len({*places}) == len(places), "two keys go to one place"
        tokens = np.concatenate([read for _, _, read in reads])
        assert (tokens >= 0).all(), "a slot without a token is read"
        pages, columns = np.transpose(places)
        assert (pages > 0).all(), "a key goes to no page"
        self.tokens[pages, columns] = tokens
        self.positions[pages, columns] = np.concatenate(
            [np.arange(start, start + len(read)) for _, start, read in reads]
        )

    def read(self, table, slot, start, count):
        """Compares what some tokens see with the oracle; returns the next token."""
        length = start + count
        first = max(start - self.window + 1, 0) if self.window else 0
        pages = table[slot, : -(-length // self.page_size)]
        found = self.tokens[pages].reshape(-1)[first:length]
        positions = self.positions[pages].reshape(-1)[first:length]
        assert (positions == np.arange(first, length)).all(), positions
        truth = true_text(self.owners[int(slot)], int(length) + 1)
        assert (found == truth[first:length]).all(), (found, truth)
        return int(truth[length])


def parts_of(plan):
    """The pass of each shard."""
    number = len(plan.tables)
    if number == 1:
        return [plan]

    def split(pieces):
        nothing = [None] * number
        columns = [nothing if x is None else np.split(x, number) for x in pieces]
        return [type(pieces)(*each) for each in zip(*columns, strict=True)]

    pieces = split(plan.lanes), split(plan.chunks)
    return [
        dataclasses.replace(
            plan, lanes=lanes, chunks=chunks, tables=(table,), admitted=(admitted,)
        )
        for lanes, chunks, table, admitted in zip(
            *pieces, plan.tables, plan.admitted, strict=True
        )
    ]


def true_text(sequence, length):
    """The first tokens of a text that no id ends."""
    text = getattr(sequence, "truth", None)
    if text is None or len(text) < length:
        num_new = max(sequence.max_new_tokens, length - len(sequence.prompt))
        new = continue_text(sequence.prompt, num_new)
        text = sequence.truth = np.array([*sequence.prompt, *new])
    return text[:length]


class Guesses:
    """A speculator that often knows the next tokens, as the oracle tells them."""

    def __init__(self, num_drafts):
        self.num_drafts, self.rng = num_drafts, random.Random(0)

    def pays(self, sequences):
        return len(sequences) > 0 and self.rng.random() < 0.7

    def propose(self, sequence):
        num_known = len(sequence.tokens)
        most = min(self.rng.randint(0, self.num_drafts), sequence.num_left - 1)
        truth = true_text(sequence, num_known + most)[num_known:]
        return [x if self.rng.random() < 0.7 else VOCAB for x in truth.tolist()]


class ObservedPool(Pool):
    """A pool that notes the pages that it hands out."""

    def __init__(self, *limits):
        super().__init__(*limits)
        self.handed = []

    def allocate(self, num_pages):
        pages = super().allocate(num_pages)
        self.handed += pages or []
        return pages

    def published(self):
        return {*self._keys}


class Loop:
    """The engine in small: passes run late, when their results are accepted.

    After each event, it checks that no page is lost, that no pass writes what others
    may read, and that every sequence that can go on does.
    """

    def __init__(
        self,
        *,
        num_pages=200,
        page_size=4,
        max_rows=8,
        max_length=64,
        sizes=SIZES,
        chunk_size=8,
        steps=8,
        lag=0,
        guesses=True,
        num_shards=1,
        window=0,
    ):
        limits = num_pages, page_size, window
        self.pools = [ObservedPool(*limits) for _ in range(num_shards)]
        self.pool = self.pools[0]
        if steps > 1:
            lanes = [x.lanes for x in sizes if x.width == 1 and not x.chunks]
            sizes = [*sizes, *(Size(number, steps=steps) for number in lanes)]
        shape = max_rows, max_length, sizes
        self.scheduler = Scheduler(self.pools, *shape, chunk_size=chunk_size)
        if guesses:
            num_drafts = self.scheduler.speculator.num_drafts
            self.scheduler.speculator = Guesses(num_drafts)
        self.shards = self.scheduler.shards
        self.slots = self.shards[0]
        shape = num_pages, page_size, max_rows, window
        self.devices = [Device(*shape) for _ in self.shards]
        self.lag, self.flying, self.plans = lag, collections.deque(), []
        self.scored = collections.defaultdict(list)
        """Places of each prompt whose scores have come, in order."""

    def add(self, *args, **options):
        return self.scheduler.add(Sequence(*args, **options))

    @property
    def is_idle(self):
        return not self.running and not self.scheduler.waiting

    @property
    def running(self):
        return [x for slots in self.shards for x in slots.running]

    def step(self):
        """Plans a pass, or runs and accepts one; returns whether either was there."""
        plan = self.plan()
        if self.flying and (plan is None or len(self.flying) > self.lag):
            self.accept()
            return True
        return plan is not None

    def plan(self):
        published = [pool.published() for pool in self.pools]
        for pool in self.pools:
            pool.handed = []
        decoding = [x for x in self.running if x.is_decoding]
        has_drafts = any(x.size.width > 1 for x in self.flying)
        plan = self.scheduler.plan()
        self.check()
        if plan is not None:
            assert not has_drafts, "a position is planned that nobody knows"
            assert plan.size.width == 1 or not self.flying, "drafts of old tokens"
            for part, slots, pages in zip(
                parts_of(plan), self.shards, published, strict=True
            ):
                self.check_arrays(part)
                self.check_held(part, slots)
                self.check_writes(part, pages - {*slots.pool.handed})
            self.check_lanes(plan, decoding)
            self.plans.append(plan)
            self.flying.append(plan)
        return plan

    def accept(self):
        oldest = self.flying.popleft()
        pairs = zip(self.devices, parts_of(oldest), strict=True)
        found = [device.run(part) for device, part in pairs]
        results = self.scheduler.accept(oldest, np.concatenate(found, axis=1))
        for sequence, _, _, scored in results:
            for chunk, tokens in scored:
                assert oldest.chunks.num_best[chunk] == sequence.prompt_logprobs
                first, count = (x[chunk] for x in oldest.chunks[1:3])
                places = np.arange(first + 1, first + count + 1)[tokens]
                self.scored[sequence] += places.tolist()
        self.check()
        return results

    def run(self):
        """Runs until nothing is left."""
        while self.step():
            pass
        assert self.is_idle, "a deadlock"
        for slots in self.shards:
            assert slots.pool.num_live == 0 and not slots._promised
        assert not self.scheduler._promises

    def check(self):
        """Fails if a page or a slot is lost, or the table is another."""
        waiting = self.scheduler.waiting
        assert not any(x.pages for x in waiting)
        queues = [waiting, *(slots.running for slots in self.shards)]
        for arrivals in ([x.arrival for x in queue] for queue in queues):
            assert arrivals == sorted(arrivals)
        for number, slots in enumerate(self.shards):
            assert {x.shard for x in slots.running} <= {number}
            slots.pool.check([x.pages[x.num_behind :] for x in slots.running])
            assert not any(any(x.pages[: x.num_behind]) for x in slots.running)
            numbers = [*slots._free, *(x.slot for x in slots.running)]
            assert sorted(numbers) == [*range(slots.max_rows)]
            wanted = np.zeros_like(slots._table)
            for sequence in slots.running:
                wanted[sequence.slot, : len(sequence.pages)] = sequence.pages
            assert (slots._table == wanted).all()

    def check_held(self, plan, slots):
        """Fails if a sequence holds more, or less, than a pass of its tokens sees."""
        pool, parts = slots.pool, (plan.lanes, plan.chunks)
        starts = {}
        for part in parts:
            for slot, start, count in zip(*part[:3], strict=True):
                if count:
                    starts[slot] = min(start, starts.get(slot, start))
        for sequence in slots.running:
            num_held = len(sequence.pages) - sequence.num_behind
            if pool.window:
                span = pool.window - 1 + slots.num_ahead
                assert num_held <= -(-(span - 1) // pool.page_size) + 1
            if sequence.slot in starts:
                first = max(starts[sequence.slot] - pool.window + 1, 0)
                behind = first // pool.page_size if pool.window else 0
                assert sequence.num_behind == behind

    def check_arrays(self, plan):
        """Fails if an array would compile another program, or an idle lane is live."""
        assert plan.size in self.scheduler.sizes
        assert plan.size.steps * plan.size.width >= plan.lanes.counts.max()
        assert all(plan.chunks.counts <= self.scheduler.chunk_size)
        width = plan.size.width
        assert width == 1 or (plan.size.steps, plan.size.chunks) == (1, 0)
        assert plan.size.steps == 1 or not plan.size.chunks
        for part, count, num_drafts in (
            (plan.lanes, plan.size.lanes, width - 1),
            (plan.chunks, plan.size.chunks, 0),
        ):
            assert {x.shape for x in part[:4]} == {(count,)}
            assert part.drafts.shape == (count, num_drafts)
            assert ((part.slots == self.slots.max_rows) == (part.counts == 0)).all()
            assert (part.ends <= (part.counts > 0)).all()
            assert part.num_best is None or part.num_best.shape == (count,)
            dtypes = [x.dtype.name for x in (*plan.tables, *part[:5])]
            assert dtypes == ["int32"] * 4 + ["bool", "int32"]

    def check_writes(self, plan, published):
        """Fails if a pass writes a page that was published before it was planned."""
        size = self.pool.page_size
        for part in (plan.lanes, plan.chunks):
            live = np.flatnonzero(part.counts)
            for slot, start, count in zip(
                part.slots[live], part.starts[live], part.counts[live], strict=True
            ):
                first, last = start // size, (start + count - 1) // size
                pages = plan.tables[0][slot, first : last + 1].tolist()
                assert not published & set(pages)

    def check_lanes(self, plan, decoding):
        """Fails if a sequence that decodes misses a pass."""
        found = []
        for shard, part in enumerate(parts_of(plan)):
            slots = part.lanes.slots[part.lanes.counts > 0].tolist()
            # Preempted, and back at once.
            slots += [slot for slot, _ in part.admitted[0]]
            found += [(shard, slot) for slot in slots]
        assert all(x.slot is None or (x.shard, x.slot) in found for x in decoding)
