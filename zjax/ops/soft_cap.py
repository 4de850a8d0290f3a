"""Scores and logits bounded by a tanh, and attention with such scores.

Reference: Gemma 2 (arXiv:2408.00118, section 2).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def soft_cap(x: Float[Array, "*dims"], cap: float) -> Float[Array, "*dims"]:
    """`cap * tanh(x / cap)`; `x` itself for a cap of 0.

    Example:
        >>> soft_cap(jnp.array([1e6]), 30.0).tolist()
        [30.0]
    """
    return cap * jnp.tanh(x / cap) if cap else x


def capped_attention(
    q: Float[Array, "B L H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    *,
    cap: float,
    mask: Bool[Array, "#B #H L S"] | None = None,
    is_causal: bool = False,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    local_window_size: tuple[int, int] | None = None,
    **_: Any,
) -> Float[Array, "B L H D"]:
    """Computes softmax(soft_cap(q k / sqrt(D))) v, with all scores in memory.

    The arguments are those of `jax.nn.dot_product_attention`, of which a window looks
    back alone.

    Args:
        q: Queries; H is a multiple of K.
        k: Keys.
        v: Values.
        cap: Bound of the scores, above 0.
        mask: True where a query sees a key.
        is_causal: Whether queries see no later keys.
        key_value_seq_lengths: Keys per row; later ones are padding.
        local_window_size: Keys before a query that it sees, and 0.

    Example:
        >>> x = jnp.ones((1, 3, 2, 4))
        >>> capped_attention(x, x, x, cap=50.0).shape
        (1, 3, 2, 4)
    """
    rows, length, heads, size = q.shape
    num_keys, kv_heads = k.shape[1:3]
    grouped = q.reshape(rows, length, kv_heads, heads // kv_heads, size)
    scores = jnp.einsum("blkgd,bskd->bkgls", grouped, k, preferred_element_type=_WIDE)
    scores = soft_cap(scores / math.sqrt(size), cap)
    back = jnp.arange(length)[:, None] - jnp.arange(num_keys)[None]
    seen = jnp.ones((1, 1, length, num_keys), bool) if mask is None else mask
    if is_causal:
        seen &= (back >= 0)[None, None]
    if local_window_size is not None:
        seen &= (back <= local_window_size[0])[None, None]
    if key_value_seq_lengths is not None:
        is_key = jnp.arange(num_keys)[None] < key_value_seq_lengths[:, None]
        seen &= is_key[:, None, None, :]
    shape = (seen.shape[0], heads, length, num_keys)
    seen = jnp.broadcast_to(seen, shape).reshape(-1, *scores.shape[1:])
    weights = jax.nn.softmax(jnp.where(seen, scores, _HIDDEN), axis=-1)
    outputs = jnp.einsum("bkgls,bskd->blkgd", weights.astype(v.dtype), v)
    return outputs.reshape(q.shape)


_WIDE = jnp.float32
_HIDDEN = -1e30
"""Score of a key that a query does not see; finite, for rows that see none."""
