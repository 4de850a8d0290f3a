"""Slots of a data shard's state: which sequence has which slot and which pages."""

import bisect
import itertools
import operator

import numpy as np

from zjax.generation.pool import SINK, Pool, most_pages
from zjax.generation.sequence import Sequence


class Slots:
    """Running sequences, each with a slot, pages and a row of the table.

    Passes run in the order of plans, and plans do not wait for results. So slot and
    pages of a sequence that leaves are free at once: a pass that still writes the pages
    runs before any pass of a new owner. Such a pass writes only behind the tokens that
    the host knows, and a published page has known tokens alone. So are pages behind a
    window, which planned passes may still read.

    Args:
        pool: Pages of the cache.
        max_rows: Number of slots.
        max_length: Most tokens of a sequence.
        num_ahead: Most tokens of a sequence that a pass reads.

    Attributes:
        running: Sequences with a slot, in order of arrival.
        num_hit_tokens: Tokens that were found in the cache, so far.
    """

    def __init__(self, pool: Pool, max_rows: int, max_length: int, num_ahead: int):
        self.pool, self.max_rows, self.num_ahead = pool, max_rows, num_ahead
        self.running: list[Sequence] = []
        self.num_hit_tokens = 0
        self._free = list(range(max_rows - 1, -1, -1))
        self._most_to_read = self.most_pages(max_length)
        self._table = np.zeros((max_rows + 1, self.num_pages(max_length)), np.int32)
        self._is_lent = False
        self._promised: set[bytes] = set()

    @property
    def is_full(self) -> bool:
        """Whether all slots are taken."""
        return not self._free

    def num_pages(self, num_tokens: int) -> int:
        """Counts the pages of a number of tokens."""
        return -(-num_tokens // self.pool.page_size)

    def most_pages(self, num_tokens: int) -> int:
        """Counts the pages that a sequence of a length holds at most."""
        pool = self.pool
        return most_pages(num_tokens, pool.page_size, pool.window, self.num_ahead)

    def lend_table(self) -> np.ndarray:
        """Returns int32[max_rows + 1, max_pages], an array that never changes again."""
        self._is_lent = True
        return self._table

    def admit(self, sequence: Sequence) -> bool:
        """Gives a sequence a slot and pages to read, if enough are available.

        A page for each running sequence is left: else the next pass might preempt the
        sequence that has just been read.
        """
        matched = self.pool.match(self._keys_to_find(sequence))
        num_tokens, num_found = len(sequence.tokens), len(matched)
        num_behind = self.pool.first_seen(num_found * self.pool.page_size)
        num_new = self._end_to_read(num_tokens, num_behind) - num_found
        num_taken = num_new + self.pool.count_cached(matched[num_behind:])
        if num_taken + len(self.running) > self.pool.num_available:
            return False
        sequence.slot = self._free.pop()
        sequence.num_to_read, sequence.num_published = num_tokens, num_found
        sequence.num_planned = num_found * self.pool.page_size
        sequence.num_behind = num_behind
        self.pool.share(matched[num_behind:])
        self._add_pages(sequence, matched)
        self.hold_next(sequence)
        self._promised.update(sequence.keys(self.pool.page_size)[num_found:])
        self.num_hit_tokens += sequence.num_planned
        bisect.insort(self.running, sequence, key=operator.attrgetter("arrival"))
        return True

    def free_behind(self) -> None:
        """Releases the pages of which no token that is yet to be planned sees a key."""
        for sequence in self.running if self.pool.window else ():
            first, end = sequence.num_behind, self.pool.first_seen(sequence.num_planned)
            if first < end:
                self.pool.release(sequence.pages[first:end])
                sequence.pages[first:end] = (end - first) * [SINK]
                self._own_table()[sequence.slot, first:end] = SINK
                sequence.num_behind = end

    def hold_next(self, sequence: Sequence) -> bool:
        """Holds the pages of what a running sequence reads next; False if too few are.

        A sequence holds the pages of all tokens that it has to read, or at any time as
        many as it needs at most under the window, so that it goes on while others grow.
        """
        if not sequence.is_reading:
            return self.grow(sequence, int(sequence.num_left > 0))
        end = self._end_to_read(sequence.num_to_read, sequence.num_behind)
        num_tokens = end * self.pool.page_size - sequence.num_planned
        return self.grow(sequence, num_tokens)

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Holds the pages of tokens to plan; False if too few are available."""
        num_missing = self.num_missing(sequence, num_tokens)
        if not num_missing:
            return True
        pages = self.pool.allocate(num_missing)
        if pages:
            self._add_pages(sequence, pages)
        return pages is not None

    def num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Counts the pages that tokens to plan need beyond the pages at hand."""
        num_pages = self.num_pages(sequence.num_planned + num_tokens)
        return max(num_pages - len(sequence.pages), 0)

    def publish(self, sequence: Sequence) -> None:
        """Lets prefixes find the pages of which all tokens are known and planned."""
        num_known = min(len(sequence.tokens), sequence.num_planned)
        num_full = num_known // self.pool.page_size
        keys = sequence.keys(self.pool.page_size)
        for number in range(sequence.num_published, num_full):
            # Under a window below a pass, a page may go before its tokens are known.
            if number >= sequence.num_behind:
                self.pool.publish(sequence.pages[number], keys[number])
            self._promised.discard(keys[number])
        sequence.num_published = num_full

    def leave(self, sequence: Sequence) -> None:
        """Takes slot and pages from a running sequence."""
        assert sequence.slot is not None
        keys = sequence.keys(self.pool.page_size)
        self._promised.difference_update(keys[sequence.num_published :])
        self.pool.release(sequence.pages[sequence.num_behind :])
        self._own_table()[sequence.slot] = 0
        self._free.append(sequence.slot)
        self.running.remove(sequence)
        sequence.slot, sequence.pages = None, []
        sequence.num_planned = sequence.num_to_read = sequence.num_published = 0
        sequence.num_behind = 0

    def find_promise(self, sequence: Sequence) -> bytes:
        """Returns the last key that a running sequence will publish for a prompt.

        Empty if the next page of the prompt is not on the way.
        """
        keys, promise = self._keys_to_find(sequence), b""
        for key in keys[len(self.pool.match(keys)) :]:
            if key not in self._promised:
                break
            promise = key
        return promise

    def count_found(self, sequence: Sequence) -> int:
        """Counts the tokens of a prompt whose keys are in the cache, or on the way."""
        keys = self._keys_to_find(sequence)
        num_found = len(self.pool.match(keys))
        promised = itertools.takewhile(self.is_promised, keys[num_found:])
        return (num_found + sum(1 for _ in promised)) * self.pool.page_size

    def is_promised(self, key: bytes) -> bool:
        """Whether a running sequence has yet to publish a key."""
        return key in self._promised

    def _keys_to_find(self, sequence: Sequence) -> list[bytes]:
        """Returns the keys of pages that the cache may supply."""
        if sequence.records and self.pool.window:
            return []  # pages behind the window are gone, and the experts with them
        keys = sequence.keys(self.pool.page_size)
        return keys[: sequence.num_reusable // self.pool.page_size]

    def _end_to_read(self, num_tokens: int, num_behind: int) -> int:
        """Returns the end of the pages to hold of a sequence with tokens to read."""
        return min(self.num_pages(num_tokens), num_behind + self._most_to_read)

    def _add_pages(self, sequence: Sequence, pages: list[int]) -> None:
        """Appends pages to a sequence and the row of the table."""
        first = len(sequence.pages)
        sequence.pages += pages
        self._own_table()[sequence.slot, first : len(sequence.pages)] = pages

    def _own_table(self) -> np.ndarray:
        """Returns a table to write, a copy if a plan has the last."""
        if self._is_lent:
            self._table, self._is_lent = self._table.copy(), False
        return self._table
