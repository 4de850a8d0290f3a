"""Pages of a KV cache: free pages, counted references, and prefixes kept for reuse."""

import collections
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

SINK = 0
"""Page that nobody owns: writes of padding go there, and nothing reads it."""


class Pool:
    """Owners of the pages of a paged KV cache; the arrays themselves are elsewhere.

    A page is free, live (some sequences hold it) or cached (nobody holds it, and the
    keys and values stay until the memory is needed, the least recently held first).
    Only a published page becomes cached: it has a key of `page_keys`, by which later
    sequences with equal tokens find it. Page 0 is the sink and never handed out.

    Args:
        num_pages: Number of pages with the sink, 2 or more.
        page_size: Tokens of a page, 1 or more.
        window: Keys that a token sees in any layer, the last its own; 0 is all. Pages
            of which no later token sees a key may go back before a text ends.

    Example:
        >>> pool = Pool(num_pages=4, page_size=2)
        >>> keys = page_keys([5, 6, 7, 8], page_size=2)
        >>> pages = pool.allocate(2)
        >>> for page, key in zip(pages, keys): pool.publish(page, key)
        >>> pool.release(pages)
        >>> pool.num_free, pool.num_live, pool.num_cached
        (1, 0, 2)
        >>> pool.match(keys) == pages
        True

    Reference:
        Kwon et al., PagedAttention (arXiv:2309.06180).
    """

    def __init__(self, num_pages: int, page_size: int, window: int = 0):
        self.num_pages, self.page_size, self.window = num_pages, page_size, window
        self._free = list(range(num_pages - 1, SINK, -1))
        self._num_holders = [0] * num_pages
        self._keys: dict[int, bytes] = {}
        self._published: dict[bytes, int] = {}
        self._cached: collections.OrderedDict[int, None] = collections.OrderedDict()

    @property
    def num_free(self) -> int:
        """Number of pages with nothing of use."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Number of pages that nobody holds and that a prefix may reuse."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Number of pages that `allocate` can hand out."""
        return len(self._free) + len(self._cached)

    @property
    def num_live(self) -> int:
        """Number of pages that sequences hold."""
        return self.num_pages - 1 - self.num_available

    def allocate(self, num_pages: int) -> list[int] | None:
        """Returns pages for one holder, or None if too few are available."""
        if num_pages > self.num_available:
            return None
        pages = [self._take() for _ in range(num_pages)]
        for page in pages:
            self._num_holders[page] = 1
        return pages

    def first_seen(self, position: int) -> int:
        """Returns the number of the first page that tokens from a position on see."""
        return first_seen(position, self.page_size, self.window)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Finds the pages of the longest prefix that need not be read, for `share`.

        The next token has to see published pages alone. In place of the pages before
        `first_seen`, which need not be published, is the sink.
        """
        num_found = num_adjacent = 0
        for number, key in enumerate(keys, start=1):
            num_adjacent = num_adjacent + 1 if key in self._published else 0
            if num_adjacent >= number - self.first_seen(number * self.page_size):
                num_found = number
            elif not self.window:
                break
        first = self.first_seen(num_found * self.page_size)
        return first * [SINK] + [self._published[key] for key in keys[first:num_found]]

    def count_cached(self, pages: Iterable[int]) -> int:
        """Counts the pages that nobody holds, which `share` makes unavailable."""
        return sum(page in self._cached for page in pages)

    def share(self, pages: Iterable[int]) -> None:
        """Adds a holder to published pages."""
        for page in pages:
            self._num_holders[page] += 1
            self._cached.pop(page, None)

    def publish(self, page: int, key: bytes) -> None:
        """Lets prefixes find a live page; a key keeps the page that it has."""
        assert self._num_holders[page] and page not in self._keys
        if key not in self._published:
            self._published[key], self._keys[page] = page, key

    def release(self, pages: Sequence[int]) -> None:
        """Takes one holder from each page of a sequence, given in order."""
        # From the end: a prefix is of no use without the pages before it.
        for page in reversed(pages):
            assert self._num_holders[page] > 0, f"page {page} has no holder"
            self._num_holders[page] -= 1
            if self._num_holders[page]:
                continue
            if page in self._keys:
                self._cached[page] = None
            else:
                self._free.append(page)

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Asserts that no page is lost, given the pages of every holder."""
        holders = collections.Counter(page for pages in held for page in pages)
        for page, count in enumerate(self._num_holders):
            assert count == holders[page], f"page {page}: {count} != {holders[page]}"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free)
        assert SINK not in free | cached | set(holders) | set(self._keys)
        assert not free & cached and not (free | cached) & set(holders)
        assert free | cached | set(holders) == set(range(1, self.num_pages))
        assert cached <= set(self._keys) and not free & set(self._keys)
        assert self._published == {key: page for page, key in self._keys.items()}

    def _take(self) -> int:
        """Takes a free page, or the cached page that was held least recently."""
        if self._free:
            return self._free.pop()
        page, _ = self._cached.popitem(last=False)
        del self._published[self._keys.pop(page)]
        return page


def first_seen(position: int, page_size: int, window: int = 0) -> int:
    """Returns the number of the first page that tokens from a position on see.

    Example:
        >>> [first_seen(position, page_size=4, window=3) for position in (5, 6, 9, 10)]
        [0, 1, 1, 2]
    """
    return max(position - window + 1, 0) // page_size if window else 0


def most_pages(
    num_tokens: int, page_size: int, window: int = 0, num_ahead: int = 1
) -> int:
    """Counts the pages that a text of a length holds at most.

    Under a window the pages of up to `num_ahead` tokens, which are read in one pass
    from any position on, and of the keys that these tokens see.

    Example:
        >>> most_pages(100, page_size=4), most_pages(100, page_size=4, window=8)
        (25, 3)
    """
    num_pages = -(-num_tokens // page_size)
    if not window:
        return num_pages
    return min(num_pages, 2 + (window + num_ahead - 3) // page_size)


def page_keys(
    tokens: Sequence[int],
    page_size: int,
    known: Sequence[bytes] = (),
    *,
    salt: bytes = b"",
) -> list[bytes]:
    """Returns a key for each full page of a text, which stands for all tokens up to it.

    `known` are the keys of the first pages, which are not computed again. Texts with
    different salts have no key in common.

    Example:
        >>> keys = page_keys([1, 2, 3, 4, 5], page_size=2)
        >>> len(keys), page_keys([1, 2, 9, 4], page_size=2)[0] == keys[0]
        (2, True)
        >>> page_keys([9, 2, 3, 4], page_size=2)[1] == keys[1]
        False
    """
    keys = list(known)
    for end in range((len(keys) + 1) * page_size, len(tokens) + 1, page_size):
        page = np.asarray(tokens[end - page_size : end], np.int32).tobytes()
        keys.append(_digest((keys[-1] if keys else _digest(salt)) + page))
    return keys


def _digest(content: bytes) -> bytes:
    """Hashes to 128 bits that nobody can make collide.

    A wrong match would show one user the text of another, and `hash` of integers
    collides by design.
    """
    return hashlib.blake2b(content, digest_size=16).digest()
