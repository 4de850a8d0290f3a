"""Which tokens an expert keeps when more chose it than it has room for."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Drop = Literal["none", "position", "first_choices", "probability", "random"]
"""The tokens that stay: the first in the batch; all first choices, then all second
choices (GShard); those of the largest scores; a random subset (DeepSpeed-MoE)."""


def keep_within_capacity(
    experts: Int[Array, "T K"],
    scores: Float[Array, "T K"],
    chosen: Bool[Array, "T K"],
    capacity: int,
    drop: Drop,
    key: jax.Array | None,
) -> Bool[Array, "T K"]:
    """Keeps at most `capacity` tokens of each expert.

    Args:
        experts: Chosen experts of each token, best first.
        scores: Scores of the chosen experts.
        chosen: Choices that count; others are never kept and use no capacity.
        capacity: Most tokens of an expert, 1 or more.
        drop: Which tokens stay; not `none`.
        key: Random key, needed for `random`.

    Returns:
        Mask of the kept choices; among equals the earlier token stays.

    Example:
        >>> experts = jnp.array([[0], [0], [0]])
        >>> scores, chosen = jnp.array([[0.2], [0.9], [0.5]]), jnp.ones((3, 1), bool)
        >>> kept = keep_within_capacity(experts, scores, chosen, 2, "probability", None)
        >>> kept[:, 0].tolist()
        [False, True, True]
    """
    expert = jnp.where(chosen, experts, jnp.iinfo(jnp.int32).max).ravel()
    order = _order(scores, drop, key).ravel()
    # Sorting is stable, and a flat index has the earlier token first.
    ranking = jnp.lexsort((order, expert))
    ranked = expert[ranking]
    first = jnp.searchsorted(ranked, ranked, side="left")
    position = jnp.arange(ranked.size) - first
    kept = jnp.zeros(ranked.size, bool).at[ranking].set(position < capacity)
    return kept.reshape(experts.shape) & chosen


def _order(scores: jax.Array, drop: Drop, key: jax.Array | None) -> jax.Array:
    """Ranks all choices; an expert keeps those of the lowest ranks."""
    if drop == "random":
        assert key is not None
        return jax.random.uniform(key, scores.shape)
    if drop == "probability":
        return -scores
    dim = {"position": 0, "first_choices": 1}[drop]
    return jax.lax.broadcasted_iota(jnp.int32, scores.shape, dim)
