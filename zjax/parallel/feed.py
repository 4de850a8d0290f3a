"""The microbatches of a pipeline, and what they count."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from zjax.comm import shards
from zjax.parallel.staged import either, read, written
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

    def batch(self, number: jax.Array) -> Batch:
        """What is computed as a microbatch.

        Args:
            number: int32[], of the microbatch.

        Returns:
            Arrays [...].
        """
        return read(self.parts, self.sources[number])


def make_feed(parts: Batch, weights: jax.Array, axes: Sequence[str] = ()) -> Feed:
    """Has no microbatch computed that counts nothing, while any device has another.

    Of padding alone, a block may have a gradient of 0 / 0, which no weight of 0 clears.

    Args:
        parts: Microbatches, stacked.
        weights: float32[microbatches], 0 or more.
        axes: Mesh axes mapped by hand, whose devices have other microbatches.

    Returns:
        Microbatches, with the heaviest in the place of those of weight 0: that of the
        device, or of all devices where it has none.

    Example:
        >>> weights = jnp.array([3.0, 0.0, 5.0])
        >>> make_feed({"x": jnp.arange(3)}, weights).sources.tolist()
        [0, 2, 2]
    """
    numbers, heaviest = jnp.arange(weights.size), jnp.argmax(weights)
    sources = jnp.where(weights > 0, numbers, heaviest)
    if axes:
        parts = _lent(parts, heaviest, weights[heaviest], axes)
    return Feed(parts, weights, sources)


def _lent(
    parts: Batch, heaviest: jax.Array, weight: jax.Array, axes: Sequence[str]
) -> Batch:
    """Where a device has no microbatch of weight, its heaviest is one of another's."""
    axes = tuple(axes)
    lender = jnp.argmax(jax.lax.all_gather(weight, axes))
    own = read(parts, heaviest)
    lent = shards.from_one(own, lender == jax.lax.axis_index(axes), axes)
    return written(parts, either(weight > 0, own, lent), heaviest)
