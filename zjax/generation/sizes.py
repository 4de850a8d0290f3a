"""Sizes of passes and of the cache: few programs, and the memory that is left."""

import math
import numbers
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from zjax.errors import ConfigError, Problem
from zjax.generation.plan import CHUNK_SIZE, NUM_STEPS, Size
from zjax.generation.pool import most_pages
from zjax.generation.prompts import longest_text
from zjax.settings import schema

MAX_ROWS = 256
"""Most rows that are written at once."""
PAGE_SIZE = 64
"""Tokens of a page of keys."""
NUM_CHUNKS = 8
"""Chunks of prompts beside the rows of a pass: 512 tokens, which keep a GPU busy."""
MAX_DRAFTS = 15
"""Most drafts that a row reads in a pass."""
_LANES = 1, 8, 64
"""Rows of passes with fewer rows than there may be."""
_DRAFTED_LANES = 8
"""Rows of the smaller pass with drafts."""
_DRAFTED_TOKENS = 256
"""Most tokens of a pass with drafts: a GPU computes about as many while it reads the
weights and the keys. With more rows, tokens are written without drafts."""
_SHARE = 0.9
"""Share of the free memory that pages take; activations of a pass need the rest."""
_ROW_TOKENS = 4096
"""Tokens of each row that pages hold where the memory is not known."""


def sizes_of(max_rows: int, num_drafts: int = 0) -> tuple[Size, ...]:
    """Returns the sizes of passes: each is a program, so they are few.

    There are 6 at most: up to 4 of rows, up to 2 of rows that read several tokens, as
    devices may read a token faster than the host plans a pass, and 1 with chunks of
    prompts. Beside 4 sizes of rows no single row reads several tokens. Drafts add a
    pass of up to 8 rows, and a pass of as many rows as read 256 tokens at once.

    Example:
        >>> [size.lanes for size in sizes_of(64)]
        [1, 8, 64, 1, 64, 64]
        >>> [(size.chunks, size.steps) for size in sizes_of(64)[3:]]
        [(0, 8), (0, 8), (8, 1)]
        >>> [(size.lanes, size.width) for size in sizes_of(64, num_drafts=7)[6:]]
        [(8, 8), (32, 8)]
    """
    lanes = [number for number in _LANES if number < max_rows] + [max_rows]
    several = {1, max_rows} if len(lanes) <= len(_LANES) else {max_rows}
    sizes = [*map(Size, lanes), *(Size(x, steps=NUM_STEPS) for x in sorted(several))]
    sizes.append(Size(max_rows, NUM_CHUNKS))
    if num_drafts:
        width = 1 + num_drafts
        most = min(max_rows, _DRAFTED_TOKENS // width)
        for number in sorted({min(_DRAFTED_LANES, most), most}):
            sizes.append(Size(number, width=width))
    return tuple(sizes)


def size_problems(
    config: schema.Model,
    max_rows: Any,
    max_length: Any,
    num_drafts: Any = 0,
    num_pages: Any = 0,
) -> Iterator[Problem]:
    """Yields what is wrong with the rows, the longest text, drafts or pages."""
    field, longest = longest_text(config)
    if not _is_between(1, max_rows, MAX_ROWS):
        problem = f"is not between 1 and {MAX_ROWS}"
        yield Problem("max_rows", max_rows, problem, "use 64")
    if not _is_between(0, max_length, longest):
        problem = f"is not between 0 and model.{field}={longest}"
        yield Problem("max_length", max_length, problem, "use 0")
    elif max_length == 1:
        problem = "leaves no room for a token after a prompt"
        yield Problem("max_length", max_length, problem, "use 0, or 2 or more")
    if not _is_between(0, num_drafts, MAX_DRAFTS):
        problem = f"is not between 0 and {MAX_DRAFTS}"
        yield Problem("num_drafts", num_drafts, problem, "use 3, or 0 for none")
    if not _is_between(0, num_pages, math.inf) or num_pages == 1:
        problem = "is not 0, nor 2 or more (one page is the sink of unused rows)"
        remedy = "use 0 to fill the memory"
        yield Problem("num_pages", num_pages, problem, remedy)


def _is_between(least: int, value: Any, most: int | float) -> bool:
    """Whether a value is an integer within bounds; a switch is none."""
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_integer and least <= int(value) <= most


def row_pages(num_tokens: int, window: int = 0) -> int:
    """Counts the pages that a row of a number of tokens holds at most.

    `window` is the window of all layers, 0 if a layer has none.

    Example:
        >>> row_pages(100), row_pages(32768, window=4096)
        (2, 73)
    """
    return most_pages(num_tokens, PAGE_SIZE, window, NUM_CHUNKS * CHUNK_SIZE)


def count_pages(
    page_bytes: int,
    max_rows: int,
    max_length: int,
    pending_bytes: int = 0,
    window: int = 0,
) -> int:
    """Counts the pages that fit in the memory that devices have left.

    `page_bytes` are the bytes on a device of a page of all layers, `pending_bytes` of
    weights that are still to be read; `window` is the window of all layers, or 0. There
    are no more pages than rows can fill: pages behind a window stay there for prefixes.
    Memory that is not known, as of a CPU, gets pages for some thousands of tokens of
    each row.
    """
    most_held = row_pages(max_length, window)
    most = 1 + max_rows * row_pages(max_length)
    if not page_bytes:  # nothing is stored
        return most
    known = _known_free_bytes()
    if not known:
        return min(most, 1 + max_rows * min(most_held, _ROW_TOKENS // PAGE_SIZE))
    number = least(fit_pages(min(known) - pending_bytes, page_bytes))
    if number < 1 + most_held:
        problem = f"leaves room for {max(number - 1, 0) * PAGE_SIZE} tokens"
        remedy = "free memory, use a smaller max_length, or offload the model"
        raise ConfigError(Problem("max_length", max_length, problem, remedy))
    return min(most, number)


def has_room(num_bytes: int, num_copies: int = 2) -> bool:
    """Whether devices have memory for weights, or do not tell.

    Weights of a state are there twice: as blocks, and in the stacks of the state.
    """
    known = _known_free_bytes()
    return least(all(num_copies * num_bytes <= _SHARE * x for x in known)) == 1


def pages_of(num_rows: int, num_tokens: int, window: int = 0) -> int:
    """Counts the pages that rows of a number of tokens fill, with the sink.

    A power of two, so that calls of other lengths share programs. `window` is the
    window of all layers, 0 if a layer has none.

    Example:
        >>> pages_of(1, 65), pages_of(8, 100)
        (4, 32)
    """
    return 1 << (num_rows * row_pages(num_tokens, window)).bit_length()


def fit_pages(free_bytes: int | float, page_bytes: int) -> int:
    """Counts the pages that take the free memory of a device."""
    return int(_SHARE * free_bytes) // page_bytes


def least(number: int) -> int:
    """Returns the least of the numbers of all processes."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.process_allgather(np.int64(number)).min())


def _known_free_bytes() -> list[int]:
    """Returns the bytes left on each local device that tells."""
    free = [_free_bytes(device) for device in jax.local_devices()]
    return [number for number in free if number is not None]


def _free_bytes(device: Any) -> int | None:
    """Returns the bytes left on a device; None if the device does not tell."""
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
