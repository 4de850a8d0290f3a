"""Which parts of the data each step draws, as a pure function of (seed, step).

Steps are drawn in blocks, each with its own generator; how often a part was drawn
before a step is a sum over the blocks before it, which takes about a microsecond per
draw, so that nothing is saved with a run.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from zjax.config.pacing import Pacing

BLOCK_STEPS = 256
"""Steps drawn at a time."""
_BLOCKS_KEPT = 8
"""Blocks whose sums are kept: a few steps are read at the same time."""


class Picked(NamedTuple):
    """The draws of one step."""

    parts: Int64[np.ndarray, " draws"]
    """Part of each draw."""
    ordinals: Int64[np.ndarray, " draws"]
    """How often that part was drawn before."""


class Picks:
    """Draws of parts with replacement, with probability proportional to their weights.

    Args:
        key: Key of the generators, such as a seed and a purpose.
        weights: Weights of the parts, above 0.
        num_open: How many of the parts, from the first on, can be drawn; steps count
            from 1.
        num_draws: Draws per step.

    Example:
        >>> from zjax.config.pacing import Pacing
        >>> picks = Picks((0,), np.ones(2), Pacing((0, 2), (1, 2)), num_draws=3)
        >>> [picks.at(0).parts.tolist(), picks.at(0).ordinals.tolist()]
        [[0, 0, 0], [0, 1, 2]]
    """

    def __init__(
        self,
        key: tuple[int, ...],
        weights: Float64[np.ndarray, " parts"],
        num_open: Pacing,
        num_draws: int,
    ):
        self._key, self._num_draws = key, num_draws
        self._ends = np.cumsum(weights, dtype=np.float64)
        self._firsts = np.array(num_open.firsts)
        self._num_open = np.array(num_open.values)
        self._before = {0: np.zeros(len(weights), np.int64)}

    def at(self, step: int) -> Picked:
        """The draws of a step, from 0 on."""
        block, place = divmod(step, BLOCK_STEPS)
        drawn = self._draw(block)
        num_parts = len(self._ends)
        taken = self._before_block(block) + np.bincount(
            drawn[:place].reshape(-1), minlength=num_parts
        )
        parts = drawn[place]
        order = np.argsort(parts, kind="stable")
        firsts = np.searchsorted(parts[order], parts[order])
        ordinals = np.empty_like(parts)
        ordinals[order] = np.arange(len(parts)) - firsts
        return Picked(parts, taken[parts] + ordinals)

    def first_parts(self, num_steps: int) -> Int64[np.ndarray, " steps"]:
        """Part of the first draw of each of the first steps."""
        blocks = range(-(-num_steps // BLOCK_STEPS))
        drawn = [self._draw(block)[:, 0] for block in blocks]
        return np.concatenate(drawn)[:num_steps]

    def _draw(self, block: int) -> Int64[np.ndarray, "steps draws"]:
        steps = np.arange(block * BLOCK_STEPS, (block + 1) * BLOCK_STEPS) + 1
        num_open = self._num_open[np.searchsorted(self._firsts, steps, "right") - 1]
        generator = np.random.default_rng([*self._key, block])
        points = generator.random((BLOCK_STEPS, self._num_draws))
        points *= self._ends[num_open - 1][:, None]
        parts = np.searchsorted(self._ends, points, "right")
        return np.minimum(parts, num_open[:, None] - 1)  # where a product rounds up

    def _before_block(self, block: int) -> Int64[np.ndarray, " parts"]:
        """How often each part is drawn before a block."""
        known = dict(self._before)  # threads may change the other
        nearest = max(number for number in known if number <= block)
        total = known[nearest]
        for number in range(nearest, block):
            drawn = self._draw(number).reshape(-1)
            total = total + np.bincount(drawn, minlength=len(total))
            known[number + 1] = total
        near = [number for number in sorted(known) if number <= block]
        recent = {0, *near[-_BLOCKS_KEPT:]}
        self._before = {number: known[number] for number in recent}
        return total
