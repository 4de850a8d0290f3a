"""Attention with all scores in memory, for soft caps, sinks and dropout.

Kernels lack these three.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zjax.ops.activation import soft_cap
from zjax.sharding.activations import first_row


class Dropout(NamedTuple):
    """Dropout of attention weights, after the softmax.

    Each query of each head draws by position in the microbatch, on any mesh.

    Reference:
        Vaswani et al. (arXiv:1706.03762) in the code that came with it; BERT
        (arXiv:1810.04805) and GPT-2 have it.
    """

    rate: float
    """Probability that a weight becomes 0."""
    key: jax.Array
    heads: Int[Array, " H"]
    """Number of each head: padding on a mesh may move a head."""

    def __call__(self, weights: Float[Array, "B H L S"]) -> Float[Array, "B H L S"]:
        """Zeroes random weights, and scales up the weights that remain."""
        num_rows, _, length, num_keys = weights.shape
        keep_probability = 1.0 - self.rate

        @functools.partial(jax.vmap, in_axes=(0, None, None))
        @functools.partial(jax.vmap, in_axes=(None, 0, None))
        @functools.partial(jax.vmap, in_axes=(None, None, 0))
        def draw(row: jax.Array, head: jax.Array, position: jax.Array) -> jax.Array:
            key = jax.random.fold_in(self.key, row * length + position)
            key = jax.random.fold_in(key, head)
            return jax.random.bernoulli(key, keep_probability, (num_keys,))

        # Global rows: a device draws as the unsharded program would.
        rows = first_row(num_rows) + jnp.arange(num_rows)
        kept = draw(rows, self.heads, jnp.arange(length))
        return jnp.where(kept, weights / keep_probability, 0.0)


def explicit_attention(
    q: Float[Array, "B L H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    *,
    cap: float = 0.0,
    dropout: Dropout | None = None,
    sinks: Float[Array, " H"] | None = None,
    mask: Bool[Array, "#B #H L S"] | None = None,
    is_causal: bool = False,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    local_window_size: tuple[int, int] | None = None,
    **_: Any,
) -> Float[Array, "B L H D"]:
    """Computes dropout(softmax(soft_cap(q k / sqrt(D)))) v, with all scores in memory.

    H is a multiple of K; a cap of 0 means none. `sinks` add a score per head to the
    softmax, without a value. Further arguments are from `jax.nn.dot_product_attention`;
    windows look back only.
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
    scores = jnp.where(seen, scores, _HIDDEN)
    # A sink is a key without a value: its column is cut off after the softmax.
    if sinks is not None:
        besides = sinks.astype(_WIDE).reshape(1, *scores.shape[1:3], 1, 1)
        besides = jnp.broadcast_to(besides, (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, besides], -1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :num_keys]
    if dropout is not None:
        by_head = weights.reshape(rows, heads, length, num_keys)
        weights = dropout(by_head).reshape(weights.shape)
    outputs = jnp.einsum("bkgls,bskd->blkgd", weights.astype(v.dtype), v)
    return outputs.reshape(q.shape)


def score_bytes(dtype: Any, *, capped: bool, dropped: bool) -> int:
    """Counts the bytes per pair and head that the backward pass reads.

    These are the scores and weights in float32, and the weights in the dtype of the
    values; dropout adds random bits, a soft cap adds tanh.
    """
    return 8 + jnp.dtype(dtype).itemsize + 4 * capped + 4 * dropped


_WIDE = jnp.float32
_HIDDEN = -1e30
"""Score of a key that a query does not see; finite, for rows that see none."""
