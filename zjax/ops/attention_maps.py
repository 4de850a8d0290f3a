"""Divergence of the attention of a student from a teacher's, beside any kernel.

Kernels return no attention weights. They are computed again from queries and keys, some
queries at a time, so that no more than a few rows of the maps are in memory.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zjax.ops.activation import soft_cap
from zjax.ops.token_chunks import float32_einsum

_NUM_QUERIES = 128
"""Queries whose weights are in memory at a time."""

Heads = tuple[Float[Array, "B L H D"], Float[Array, "B L K D"]]
"""Queries and keys."""


def attention_divergence(
    student: Heads,
    teacher: Heads,
    *,
    cap: float = 0.0,
    segment_ids: Int[Array, "B L"] | None = None,
    token_mask: Bool[Array, "B L"] | None = None,
) -> Float[Array, ""]:
    """Averages KL(teacher || student) of causal attention over heads and tokens.

    Both have equally many query heads; head i follows head i. The teacher is not
    differentiated.

    Args:
        student: Queries and keys, after norms and rotation.
        teacher: Queries and keys; H and L as the student's.
        cap: Bound of the scores of both by tanh; 0 for none.
        segment_ids: Document of each token; others are hidden. None for one document.
        token_mask: Tokens that count; None for all.

    Example:
        >>> q, k = jnp.ones((1, 2, 1, 1)), jnp.array([0.0, 1.0]).reshape(1, 2, 1, 1)
        >>> f"{attention_divergence((q, k), (0 * q, k)):.4f}"
        '0.0601'

    Reference:
        Wang et al., MiniLM (arXiv:2002.10957, section 3.1).
    """
    num_rows, length = student[0].shape[:2]
    if token_mask is None:
        token_mask = jnp.ones((num_rows, length), bool)
    teacher = jax.lax.stop_gradient(teacher)
    size = min(length, _NUM_QUERIES)
    places = jnp.arange(-(-length // size) * size).reshape(-1, size)

    # Recomputed in the backward pass, like the weights in a kernel.
    @jax.checkpoint
    def of_queries(places):
        rows = jnp.minimum(places, length - 1)
        seen = jnp.arange(length)[None, None] <= rows[None, :, None]
        if segment_ids is not None:
            seen &= segment_ids[:, rows, None] == segment_ids[:, None]
        log_p, log_q = (
            _log_weights(q[:, rows], k, seen, cap) for q, k in (teacher, student)
        )
        values = jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1).mean(1)
        return jnp.sum(values * (token_mask[:, rows] & (places < length)[None]))

    total = jax.lax.map(of_queries, places).sum()
    return total / jnp.maximum(token_mask.sum(), 1)


def _log_weights(q, k, seen, cap):
    """Returns the logarithm of attention weights, float32[B, H, Q, L]."""
    num_rows, num_queries, num_heads, size = q.shape
    q = q.reshape(num_rows, num_queries, k.shape[2], -1, size)
    scores = float32_einsum("bqkgd,blkd->bkgql", q, k) / size**0.5
    scores = soft_cap(scores.reshape(num_rows, num_heads, *scores.shape[3:]), cap)
    # Finite, as 0 * inf would be NaN.
    hidden = jnp.finfo(jnp.float32).min / 4
    return jax.nn.log_softmax(jnp.where(seen[:, None], scores, hidden))
