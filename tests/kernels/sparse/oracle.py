"""The rules of sparse attention, block by block and with loops: the specification."""

import numpy as np


def draw(num_blocks, is_live, *, attention):
    """The layout of one head; `is_live(row, column)` says the rule for both ways."""
    live = np.zeros((num_blocks, num_blocks), bool)
    for row in range(num_blocks):
        for column in range(num_blocks):
            seen = attention == "bidirectional" or column <= row
            live[row, column] = seen and is_live(row, column)
    return live


def dense(num_blocks, *, attention="bidirectional"):
    return draw(num_blocks, lambda row, column: True, attention=attention)


def fixed(
    num_blocks,
    *,
    num_local_blocks=4,
    num_global_blocks=1,
    place=0,
    horizontal_global_attention=False,
    attention="bidirectional",
):
    """`place` counts from the end of the window: that of a head's global blocks."""
    everywhere = set()
    for window in range(0, num_blocks, num_local_blocks):
        first = window + num_local_blocks - (place + 1) * num_global_blocks
        if window + num_local_blocks > num_blocks:
            first = min(first, num_blocks - num_global_blocks)
        everywhere |= set(range(first, first + num_global_blocks))

    def is_live(row, column):
        same_window = row // num_local_blocks == column // num_local_blocks
        sees_all = horizontal_global_attention and row in everywhere
        return same_window or column in everywhere or sees_all

    return draw(num_blocks, is_live, attention=attention)


def variable(
    num_blocks,
    *,
    local_window_blocks=(4,),
    global_block_indices=(0,),
    global_block_end_indices=None,
    horizontal_global_attention=False,
    attention="bidirectional",
):
    """Without random blocks."""
    sizes = list(local_window_blocks)
    window_of = []
    while len(window_of) < num_blocks:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        window_of += [len(window_of)] * size
    everywhere = listed(global_block_indices, global_block_end_indices)

    def is_live(row, column):
        sees_all = horizontal_global_attention and row in everywhere
        same_window = window_of[row] == window_of[column]
        return same_window or column in everywhere or sees_all

    return draw(num_blocks, is_live, attention=attention)


def longformer(
    num_blocks,
    *,
    num_sliding_window_blocks=3,
    global_block_indices=(0,),
    global_block_end_indices=None,
    attention="bidirectional",
):
    everywhere = listed(global_block_indices, global_block_end_indices)

    def is_live(row, column):
        near = abs(row - column) <= num_sliding_window_blocks // 2
        return near or row in everywhere or column in everywhere

    return draw(num_blocks, is_live, attention=attention)


def big_bird(
    num_blocks,
    *,
    num_sliding_window_blocks=3,
    num_global_blocks=1,
    attention="bidirectional",
):
    """Without random blocks."""
    return longformer(
        num_blocks,
        num_sliding_window_blocks=num_sliding_window_blocks,
        global_block_indices=range(num_global_blocks),
        attention=attention,
    )


def sliding(num_blocks, *, num_sliding_window_blocks=3, attention="unidirectional"):
    return longformer(
        num_blocks,
        num_sliding_window_blocks=num_sliding_window_blocks,
        global_block_indices=(),
        attention=attention,
    )


def listed(indices, ends):
    """Blocks of all ranges, those beyond the sequence too."""
    found = set()
    for number, start in enumerate(indices):
        found |= set(range(start, start + 1 if ends is None else ends[number]))
    return found
