"""The microbatches of a pipeline, and what they count."""

import dataclasses

import jax
import jax.numpy as jnp

from zjax.parallel.staged import read
from zjax.typing import Batch


@dataclasses.dataclass(frozen=True)
class Feed:
    """Microbatches as a pipeline computes them, whose weights say what they count.

    Args:
        parts: Stacked.
        weights: float32[microbatches].
        sources: int32[microbatches], the one that is computed in the place of each.
    """

    parts: Batch
    weights: jax.Array
    sources: jax.Array

    @property
    def counts(self) -> jax.Array:
        """bool[], whether any of them has weight."""
        return jnp.any(self.weights > 0)

    def batch(self, number: jax.Array) -> Batch:
        """What is computed as a microbatch.

        Args:
            number: int32[], of the microbatch.

        Returns:
            Arrays [...].
        """
        return read(self.parts, self.sources[number])


def make_feed(parts: Batch, weights: jax.Array) -> Feed:
    """Has no microbatch computed that counts nothing, while there is another.

    Of padding alone, a block may have a gradient of 0 / 0, which no weight of 0 clears.

    Args:
        parts: Microbatches, stacked.
        weights: float32[microbatches], 0 or more.

    Returns:
        Microbatches, with the heaviest in the place of those of weight 0.

    Example:
        >>> weights = jnp.array([3.0, 0.0, 5.0])
        >>> make_feed({"x": jnp.arange(3)}, weights).sources.tolist()
        [0, 2, 2]
    """
    numbers = jnp.arange(weights.size)
    sources = jnp.where(weights > 0, numbers, jnp.argmax(weights))
    return Feed(parts, weights, sources)
