"""What a schedule says, read entry by entry as a kernel reads it."""

import numpy as np


def decode(schedule):
    """The mask of tokens per head; fails if a token is visited twice.

    Returns:
        bool[heads, rows, columns].
    """
    masks = [decode_pattern(schedule, number) for number in range(len(schedule.items))]
    return np.stack([masks[number] for number in schedule.head_patterns])


def decode_pattern(schedule, pattern):
    visits = np.zeros((schedule.num_rows, schedule.num_columns), np.int32)
    items = schedule.items[pattern, : int(schedule.num_items[0])]
    for tile, first, count, full, _ in items[items[:, 0] >= 0]:
        rows = tokens(schedule.rows[pattern, tile], schedule.row_unit)
        for chunk in range(first, first + count):
            columns = tokens(schedule.columns[chunk], schedule.column_unit)
            live = chunk_mask(schedule, chunk, rows, columns)
            if chunk < first + full:
                assert live.all()
            np.add.at(visits, (rows[:, None], columns), live)
    assert visits.max(initial=0) <= 1
    return visits > 0


def chunk_mask(schedule, chunk, rows, columns):
    """bool[128, chunk]: which tokens of a chunk live."""
    cells = unpack(schedule, schedule.live[chunk])
    diagonal = unpack(schedule, schedule.diagonal[chunk])
    late, early = (
        (columns, rows[:, None])
        if not schedule.transposed
        else (rows[:, None], columns)
    )
    above = late % schedule.cell > early % schedule.cell
    return cells & ~(diagonal & above) & elements_of(schedule, chunk)


def unpack(schedule, words):
    cell, chunk = schedule.cell, schedule.chunk
    bits = np.arange(64 // cell * (chunk // cell))
    cells = words.view(np.uint32)[:, None] >> bits & 1
    cells = cells.reshape(128 // cell, chunk // cell).astype(bool)
    return cells.repeat(cell, 0).repeat(cell, 1)


def tokens(units, size):
    return (np.asarray(units)[:, None] * size + np.arange(size)).reshape(-1)


def elements_of(schedule, chunk):
    if schedule.masks is None:
        return True
    words = np.concatenate(list(schedule.masks[schedule.elements[chunk]]), axis=1)
    bits = words.T.view(np.uint32)[..., None] >> np.arange(32) & 1
    return bits.reshape(128, schedule.chunk).astype(bool)
