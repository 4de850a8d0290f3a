"""Rounding at random by the list of all numbers that a format has."""

import numpy as np


def bfloat16_numbers():
    """All finite numbers of bfloat16 that are not negative, ascending."""
    words = np.arange(0x7F80, dtype=np.uint32) << 16
    return words.view(np.float32).astype(np.float64)


def eight_bit_numbers(signed):
    """What the codes stand for, relative to the scale: 1, 15/16, 14/16, ... and 0."""
    count = 127 if signed else 255
    above = [1.0]
    while len(above) < count:
        exponent, eighth = divmod(len(above) - 1, 8)
        above.append((15 - eighth) / 8 * 2.0 ** (-1 - exponent))
    return np.array([0.0, *above[::-1]])


def round_at_random(x, numbers, uniform):
    """Up where `uniform` in [0, 1) is at least the distance from the upper neighbour.

    Returns the index into `numbers` of what each `x` becomes.
    """
    x = np.float64(x)
    low = np.clip(np.searchsorted(numbers, x, side="right") - 1, 0, len(numbers) - 2)
    part = (x - numbers[low]) / (numbers[low + 1] - numbers[low])
    return low + (uniform >= 1 - part)
