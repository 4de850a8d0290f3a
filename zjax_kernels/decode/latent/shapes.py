"""Sizes of latents that have a kernel, and what else the kernel needs."""

from typing import Any

from zjax_kernels.decode.reference import Cache, Options

QUERY_HEADS = (8, 16, 32, 64, 128)
"""Query heads per head of latents of the kernel."""
_CHUNK = 64
"""Channels of a swizzled row; the channels of latents are a multiple."""
_MOST = 576
"""Channels of the largest latents: queries and two stages fit in shared memory."""
_MOST_VALUES = 512
"""Channels of values whose outputs fit in the registers of two warpgroups."""


def has_sizes(cache: Cache, options: Options) -> bool:
    """Whether keys and values have sizes of latents, with values the first channels.

    Each of two warpgroups takes half the channels of the values.
    """
    size, width = cache.keys.shape[3], options.value_size
    fit = size % _CHUNK == 0 and width % (2 * _CHUNK) == 0
    return fit and width < size <= _MOST and width <= _MOST_VALUES


def obstacle(q: Any, cache: Cache, sinks: Any, options: Options) -> tuple[str, str]:
    """Returns problem and remedy of latents without a kernel, or empty strings."""
    if cache.values is not cache.keys:
        size, width = cache.keys.shape[3], options.value_size
        problem = f"it needs keys of {size} channels to be the values, of {width}"
        return problem, "give the keys as the values, with a value_size"
    group = q.shape[2] // cache.keys.shape[1]
    if group not in QUERY_HEADS:
        known = ", ".join(map(str, QUERY_HEADS))
        problem = f"it needs {known} query heads per head of latents, not {group}"
        return problem, "pad the heads"
    unsupported = {
        "window": options.window,
        "soft_cap": options.soft_cap,
        "sinks": sinks is not None,
    }
    for name, is_set in unsupported.items():
        if is_set:
            return f"it attends to latents without {name}", f"leave out {name}"
    return "", ""
