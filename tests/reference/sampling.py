"""The order of samples, one Python integer at a time."""

import numpy as np

WORD = (1 << 64) - 1


def mix(value):
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & WORD
    return value ^ (value >> 31)


def permuted(position, num_rows, seed, epoch):
    half_bits = 1
    while 4**half_bits < num_rows:
        half_bits += 1
    size = 2**half_bits
    key = seed if isinstance(seed, tuple) else (seed,)
    keys = np.random.SeedSequence([*key, epoch]).generate_state(8, np.uint64)
    value = position
    while True:
        left, right = divmod(value, size)
        for key in map(int, keys):
            left, right = right, left ^ (mix((right + key) & WORD) % size)
        value = left * size + right
        if value < num_rows:
            return value


def batch(step, num_rows, seed, global_batch_size):
    rows = []
    for position in range(step * global_batch_size, (step + 1) * global_batch_size):
        epoch, within = divmod(position, num_rows)
        rows.append(permuted(within, num_rows, seed, epoch))
    return rows
