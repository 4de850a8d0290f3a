"""Pages: handed out once, shared by prefix, kept until their memory is needed."""

import random

import pytest

from zjax.generation.pool import SINK, Pool, first_seen, most_pages, page_keys


def make_published(pool, tokens):
    keys = page_keys(tokens, pool.page_size)
    pages = pool.allocate(len(keys))
    for page, key in zip(pages, keys, strict=True):
        pool.publish(page, key)
    return pages, keys


def test_every_page_but_the_sink_is_handed_out_once():
    pool = Pool(num_pages=6, page_size=4)
    assert pool.allocate(6) is None
    pages = [*pool.allocate(2), *pool.allocate(3)]
    assert sorted(pages) == [1, 2, 3, 4, 5] and SINK not in pages
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []
    pool.release(pages)
    assert (pool.num_free, pool.num_live, pool.num_cached) == (5, 0, 0)


def test_a_shared_page_lives_until_the_last_holder_leaves():
    pool = Pool(num_pages=4, page_size=2)
    pages, keys = make_published(pool, [1, 2, 3, 4])
    pool.share(pool.match(keys))
    pool.release(pages)
    assert pool.num_live == 2
    assert pool.allocate(2) is None
    pool.release(pages)
    assert (pool.num_live, pool.num_cached) == (0, 2)
    with pytest.raises(AssertionError, match="has no holder"):
        pool.release(pages)


def test_the_prefix_that_was_held_least_recently_makes_room():
    """Fails if the start of a text goes before its end, or new texts before old."""
    pool = Pool(num_pages=6, page_size=2)
    old, old_keys = make_published(pool, [1, 2, 3, 4])
    new, new_keys = make_published(pool, [5, 6, 7, 8])
    pool.release(old)
    pool.release(new)
    pool.allocate(1)  # the page that was free
    assert pool.allocate(1) == [old[1]]
    assert (pool.match(old_keys), pool.match(new_keys)) == (old[:1], new)
    pool.share(old[:1])
    pool.release(old[:1])
    assert pool.allocate(2) == new[::-1]
    assert (pool.match(old_keys), pool.match(new_keys)) == (old[:1], [])


def test_pages_that_a_prefix_takes_are_not_available():
    pool = Pool(num_pages=4, page_size=2)
    pages, _ = make_published(pool, [1, 2, 3, 4])
    assert pool.count_cached(pages) == 0
    pool.release(pages)
    assert (pool.count_cached(pages), pool.num_available) == (2, 3)
    pool.share(pages)
    assert (pool.count_cached(pages), pool.num_available) == (0, 1)


def test_a_second_page_of_a_text_is_not_found():
    pool = Pool(num_pages=4, page_size=2)
    first, keys = make_published(pool, [1, 2])
    second, _ = make_published(pool, [1, 2])
    assert pool.match(keys) == first
    pool.release(second)
    pool.release(first)
    assert (pool.num_free, pool.num_cached) == (2, 1)


def test_a_key_stands_for_all_tokens_up_to_the_page():
    """Fails for a key of the page alone, of lengths, or of a weak hash."""
    texts = [[1, 2, 3, 4], [2, 1, 3, 4], [1, 2, 3, 5], [0, 2, 3, 4], [1, 2, 4, 3]]
    # Python's hashes of -1 and -2 are equal.
    texts += [[-1, 0, 3, 4], [-2, 0, 3, 4], [1, 2, 3, 4 + 2**16]]
    assert len({page_keys(text, 2)[1] for text in texts}) == len(texts)
    keys = page_keys(range(100), 7)
    assert len(keys) == 14
    assert page_keys(range(100), 7, keys[:5]) == keys
    assert page_keys(range(34), 7) == keys[:4]
    salted = page_keys(range(100), 7, salt=b"1")
    assert not {*salted} & {*keys}
    assert page_keys(range(100), 7, salted[:5], salt=b"1") == salted


def test_a_prefix_needs_the_pages_in_the_window_of_the_next_token():
    """Fails if pages behind the window are needed, or one within it is not."""
    pool = Pool(num_pages=9, page_size=2, window=4)
    pages, keys = make_published(pool, [*range(16)])
    assert pool.match(keys) == 6 * [SINK] + pages[6:]
    pool.release(pages)
    assert pool.allocate(2) == pages[:-3:-1]
    assert pool.match(keys) == 4 * [SINK] + pages[4:6]
    pool.share(pages[:2])
    pool.allocate(4)
    assert pool.match(keys) == pages[:2]
    assert Pool(9, 2, window=1).match(keys) == 8 * [SINK]


@pytest.mark.parametrize("num_ahead", [1, 2, 7])
@pytest.mark.parametrize("window", [1, 2, 3, 8, 9])
@pytest.mark.parametrize("page_size", [1, 4])
def test_pages_are_held_for_what_a_pass_sees(page_size, window, num_ahead):
    """Compares the bound with the pages of all passes, which reach it."""
    held = []
    for start in range(30):
        seen = range(max(start - window + 1, 0), start + num_ahead)
        pages = {place // page_size for place in seen}
        assert first_seen(start, page_size, window) == min(pages)
        held.append(len(pages))
    assert most_pages(100, page_size, window, num_ahead) == max(held)
    assert most_pages(page_size, page_size, window, num_ahead) == 1
    assert first_seen(100, page_size) == 0 and most_pages(9, 4) == 3


@pytest.mark.parametrize("seed", range(4))
def test_no_page_is_lost(seed):
    rng = random.Random(seed)
    pool, held = Pool(num_pages=12, page_size=2), []
    num_found = 0
    for _ in range(2_000):
        if len(held) > rng.randrange(8):
            pool.release(held.pop(rng.randrange(len(held))))
        text = [rng.randrange(2) for _ in range(2 * rng.randrange(1, 5))]
        keys = page_keys(text, 2)
        matched = pool.match(keys)
        pool.share(matched)
        new = pool.allocate(len(keys) - len(matched))
        for page, key in zip(new or [], keys[len(matched) :], strict=new is not None):
            pool.publish(page, key)
        held.append([*matched, *(new or [])])
        num_found += len(matched)
        pool.check(held)
    assert num_found > 500
