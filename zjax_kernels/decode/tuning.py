"""Tuning of the kernel of paged attention: a table for the H200."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Sizes that set how fast the kernel runs.

    Args:
        stages: Steps of keys in shared memory at a time, 2 or more.
        programs_per_sm: Programs per SM up to which rows are split, 1 or more.
        min_steps: Least steps of a split of the longest row, 1 or more.
    """

    stages: int
    programs_per_sm: int = 2
    # Of 17 steps and 32 heads, 4 programs are a little faster than 2, and 8 slower.
    min_steps: int = 4


SPLITS = 1, 2, 4, 8
"""Programs that may share a row: clusters that any Hopper GPU runs, and that divide the
channels of a head."""
H200 = {
    64: Tuning(stages=6, min_steps=2),
    # Two programs share an SM: one waits for copies while the other computes.
    128: Tuning(stages=3),
    256: Tuning(stages=3, programs_per_sm=1),
}
"""Tunings by head size."""
