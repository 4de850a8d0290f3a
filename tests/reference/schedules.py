"""Learning rates in closed form, as fractions of the peak."""

import math


def fraction(step, *, kind, num_steps, num_warmup, final, decay_fraction):
    last = num_steps - 1
    if step < num_warmup:
        return step / num_warmup
    if kind == "constant":
        return 1.0
    start = num_warmup
    if kind == "wsd":
        start = max(start, last - round(decay_fraction * num_steps))
    if step < start:
        return 1.0
    done = min(1.0, (step - start) / (last - start))
    if kind == "cosine":
        return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2
    return final + (1 - final) * (1 - done)
