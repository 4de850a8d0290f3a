"""Paged attention in NumPy, one token and head at a time; random caches."""

import numpy as np


def attend(
    q,
    keys,
    values,
    pages,
    starts,
    counts,
    *,
    scale=None,
    window=0,
    soft_cap=0.0,
    sinks=None,
    value_size=0,
):
    q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
    chunks, tokens, heads, size = q.shape
    _, num_heads, page_size, width = keys.shape[:3] + values.shape[3:]
    width = value_size or width
    out = np.zeros((chunks, tokens, heads, width))
    for chunk, token, head in np.ndindex(chunks, tokens, heads):
        if token >= counts[chunk]:
            continue
        position = starts[chunk] + token
        first = max(0, position - window + 1) if window else 0
        places = [
            (
                pages[chunk][at // page_size],
                head // (heads // num_heads),
                at % page_size,
            )
            for at in range(first, position + 1)
        ]
        scores = np.array([keys[place] @ q[chunk, token, head] for place in places])
        scores *= size**-0.5 if scale is None else scale
        if soft_cap:
            scores = soft_cap * np.tanh(scores / soft_cap)
        if sinks is not None:
            scores = np.append(scores, np.float64(sinks[head]))
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        for weight, place in zip(weights, places, strict=False):
            out[chunk, token, head] += weight * values[place][:width]
    return out


def make_case(
    starts,
    counts,
    *,
    tokens=1,
    heads=4,
    num_heads=2,
    size=64,
    value_size=None,
    page_size=16,
    window=0,
    seed=0,
):
    """Queries, a cache of shuffled pages of which nobody's keys are NaN, and places.

    Pages before a window are nobody's, too.
    """
    rng = np.random.default_rng(seed)
    chunks, lengths = len(starts), np.add(starts, counts)
    needed = -(-lengths // page_size)
    table = np.zeros((chunks, max(1, needed.max())), np.int32)
    order = 1 + rng.permutation(needed.sum())
    for row, last in enumerate(np.cumsum(needed)):
        table[row, : needed[row]] = order[last - needed[row] : last]
    pools = []
    for channels in (size, value_size or size):
        shape = 1 + needed.sum(), num_heads, page_size, channels
        pool = np.full(shape, np.nan, np.float32)
        for row in range(chunks):
            for number in range(needed[row]):
                used = min(page_size, lengths[row] - number * page_size)
                some = rng.normal(size=(num_heads, used, channels))
                pool[table[row, number], :, :used] = some
        pools.append(pool)
    if window:
        for row, start in enumerate(starts):
            table[row, : max(0, start - window + 1) // page_size] = 0
    q = rng.normal(size=(chunks, tokens, heads, size)).astype(np.float32)
    return q, *pools, table, np.int32(starts), np.int32(counts)
