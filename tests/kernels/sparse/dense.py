"""Dense attention under a mask of tokens, in float32: the specification."""

import functools

import jax
import jax.numpy as jnp
import numpy as np


@functools.partial(jax.jit, static_argnames=("scale", "soft_cap"))
def attend(q, k, v, mask, *, scale=None, soft_cap=0.0):
    """Averages and log-sum-exps; `mask` is bool[B or 1, H, S, T]."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (x.repeat(group, axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if soft_cap:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(mask, scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    level = jnp.where(jnp.isneginf(lse), 0.0, lse)
    p = jnp.where(mask, jnp.exp(scores - level[..., None]), 0.0)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v), lse


def mask_of(layout, segments=None, key_mask=None):
    """Which tokens see each other: bool[B or 1, H, S, T]."""
    live = layout.to_dense().repeat(layout.block, 1).repeat(layout.block, 2)
    if layout.causal:
        live = live & np.tri(*live.shape[1:], dtype=bool)
    mask = live[None]
    if segments is not None:
        mask = mask & (segments[0][:, None, :, None] == segments[1][:, None, None, :])
    if key_mask is not None:
        mask = mask & key_mask[:, None, None, :]
    return mask


def make_inputs(layout, *, batch=2, num_kv_heads=None, head_size=16, dtype=jnp.float32):
    """Normal q, k, v and gradients of averages and log-sum-exps."""
    heads = layout.num_heads
    lengths = layout.num_rows * layout.block, layout.num_columns * layout.block
    of_q = (batch, lengths[0], heads, head_size)
    of_k = (batch, lengths[1], num_kv_heads or heads, head_size)
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = of_q, of_k, of_k, of_q
    arrays = [
        jax.random.normal(key, shape, dtype)
        for key, shape in zip(keys, shapes, strict=False)
    ]
    return (*arrays, jax.random.normal(keys[4], (batch, heads, lengths[0])))
