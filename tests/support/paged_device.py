"""A device of NumPy that runs plans of the scheduler literally.

It stores tokens and positions where a model stores keys and values. Every lane and
chunk gathers its whole prefix through the table, and the next token is a hash of the
prefix: a wrong page, position or order gives another text, or is caught at once.
"""

import collections

import numpy as np

from zjax.generation.pool import Pool, page_keys
from zjax.generation.scheduler import Scheduler

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
    """State of all slots and pages, changed by passes in order."""

    def __init__(self, num_pages, page_size, max_rows, max_length):
        self.tokens = np.full((num_pages, page_size), -1, np.int64)
        self.positions = np.full((num_pages, page_size), -1, np.int64)
        self.last = np.full(max_rows + 1, -1, np.int64)
        self.owners = {}
        self.powers = np.ones(max_length + 1, np.uint64)
        for i in range(1, max_length + 1):
            self.powers[i] = int(self.powers[i - 1]) * FACTOR & MASK

    def run(self, plan):
        """Runs a pass; returns int[num_steps, lanes + chunks], -1 where nothing is."""
        for slot, sequence in plan.admitted:
            self.last[slot], self.owners[slot] = -1, sequence
        num_lanes = plan.size.lanes
        shape = plan.num_steps, num_lanes + plan.size.chunks
        results = np.full(shape, -1, np.int64)
        for step in range(plan.num_steps):
            live = plan.lanes.counts > step
            writes = [(plan.lanes.slots[live], plan.lanes.starts[live] + step)]
            values = [self.last[plan.lanes.slots[live]]]
            for i in range(plan.size.chunks):
                slot, start, count = (x[i] for x in plan.chunks[1:4])
                writes.append((np.full(count, slot), np.arange(start, start + count)))
                values.append(plan.chunks.tokens[i, :count])
            self.write(plan.table, writes, np.concatenate(values))
            new = {}
            for i in np.flatnonzero(live).tolist():
                slot, position = plan.lanes.slots[i], plan.lanes.starts[i] + step
                new[i] = slot, self.read(plan.table, slot, position + 1)
            for i in range(plan.size.chunks):
                slot, start, count, is_last = (x[i] for x in plan.chunks[1:])
                assert slot < len(self.last) - 1 or not count
                if count:
                    token = self.read(plan.table, slot, start + count)
                if is_last:
                    new[num_lanes + i] = slot, token
            for column, (slot, token) in new.items():
                results[step, column] = self.last[slot] = token
        return results

    def write(self, table, writes, values):
        slots, positions = (np.concatenate(x) for x in zip(*writes, strict=True))
        page_size = self.tokens.shape[1]
        pages, columns = table[slots, positions // page_size], positions % page_size
        assert (values >= 0).all(), "a slot without a token is read"
        assert (pages > 0).all(), "a key goes to no page"
        places = pages * page_size + columns
        assert len(np.unique(places)) == len(places), "two keys go to one place"
        self.tokens[pages, columns] = values
        self.positions[pages, columns] = positions

    def read(self, table, slot, length):
        """Compares a whole prefix with the oracle; returns the next token."""
        pages = table[slot, : -(-length // self.tokens.shape[1])]
        found = self.tokens[pages].reshape(-1)[:length]
        positions = self.positions[pages].reshape(-1)[:length]
        np.testing.assert_array_equal(positions, np.arange(length))
        sequence = self.owners[int(slot)]
        truth = true_text(sequence, int(length))
        np.testing.assert_array_equal(found, truth)
        terms = (found + 1).astype(np.uint64) * self.powers[length - 1 :: -1][:length]
        return choose(int(terms.sum(dtype=np.uint64)))


def true_text(sequence, length):
    """The first tokens of a text that no id ends."""
    text = getattr(sequence, "truth", None)
    if text is None or len(text) < length:
        num_new = max(sequence.max_new_tokens, length - len(sequence.prompt))
        new = continue_text(sequence.prompt, num_new)
        text = sequence.truth = np.array([*sequence.prompt, *new])
    return text[:length]


class Loop:
    """The engine in small: runs passes at once, and accepts them some plans later.

    After each event, it checks that no page is lost or written after publication.
    """

    def __init__(
        self, *, num_pages, page_size, max_rows, sizes, max_length=64, lag=0, **options
    ):
        self.pool = Pool(num_pages, page_size)
        self.scheduler = Scheduler(self.pool, max_rows, max_length, sizes, **options)
        self.device = Device(num_pages, page_size, max_rows, max_length)
        self.lag, self.flying, self.plans = lag, collections.deque(), []

    def step(self):
        """Plans and runs a pass, or accepts one; returns whether either was there."""
        before = dict(self.pool._keys)
        plan = self.scheduler.plan()
        self.check()
        if plan is not None:
            self.check_writes(plan, before)
            self.plans.append(plan)
            self.flying.append((plan, self.device.run(plan)))
        if self.flying and (plan is None or len(self.flying) > self.lag):
            self.scheduler.accept(*self.flying.popleft())
            self.check()
            return True
        return plan is not None

    def run(self):
        """Runs until nothing is left."""
        while self.step():
            pass
        scheduler = self.scheduler
        assert not scheduler.running and not scheduler.waiting, "a deadlock"
        assert self.pool.num_live == 0

    def check(self):
        scheduler = self.scheduler
        self.pool.check([x.pages for x in scheduler.running])
        slots = [x.slot for x in scheduler.running]
        free = scheduler._slots
        assert sorted([*slots, *free]) == [*range(scheduler.max_rows)]
        assert not any(x.pages for x in scheduler.waiting)
        wanted = np.zeros_like(scheduler._table)
        for sequence in scheduler.running:
            wanted[sequence.slot, : len(sequence.pages)] = sequence.pages
        np.testing.assert_array_equal(scheduler._table, wanted)

    def check_writes(self, plan, before):
        """Fails if a pass writes a page that was published before it was planned."""
        still = {p for p, key in before.items() if self.pool._keys.get(p) == key}
        size = self.pool.page_size
        for part in (plan.lanes, plan.chunks):
            for slot, start, count in zip(
                part.slots, part.starts, part.counts, strict=True
            ):
                if count:
                    first, last = start // size, (start + count - 1) // size
                    assert not still & set(plan.table[slot, first : last + 1].tolist())


def check_keys(loop):
    """Fails if a published page holds other tokens than the key says."""
    for sequence in loop.scheduler.running:
        keys = page_keys(sequence.tokens, loop.pool.page_size)
        for page, key in zip(sequence.pages, keys, strict=False):
            assert loop.pool._keys.get(page, key) == key
