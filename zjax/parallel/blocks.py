"""Attention over a block of keys, as a partial result that merges with others.

Averages over blocks of keys are merged by the logarithms of their sums of exponentials
(lse). Given the lse over all keys, gradients of blocks add up.

Hopper GPUs run the kernels of `zjax_kernels`; elsewhere XLA computes the scores of
`CHUNK` keys at a time.

Reference: Dao et al., FlashAttention (arXiv:2205.14135), algorithms 1 and 4.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jaxtyping import Array, Float, Int

import zjax_kernels
from zjax.ops.attention import Implementation
from zjax_kernels.device import why_unsupported

CHUNK = 1024
"""Keys whose scores are in memory at the same time, at most."""
BLOCK = 128
"""The kernels take multiples of this number of tokens."""

Ids = tuple[Int[Array, "B L"], Int[Array, "B S"]] | None
"""Document of each query and key; queries see keys of their document. None: all."""


def attend(
    q: Float[Array, "B L H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    ids: Ids,
    *,
    causal: bool,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B L H D"], Float[Array, "B L H"]]:
    """Averages of the values, and logarithms of the sums of exponentials of scores.

    Args:
        q: Queries; H is a multiple of K.
        k: Keys.
        v: Values.
        ids: Documents.
        causal: Whether query i sees no key after i (L = S).
        implementation: `auto` uses kernels where they run, `xla` never.

    Returns:
        Averages in the dtype of `q`, and float32. A query that sees no key has 0 and
        -inf.

    Example:
        >>> x = jnp.ones((1, 2, 1, 4))
        >>> _, lse = attend(x, x, x, None, causal=True)
        >>> [round(float(x), 3) for x in lse[0, :, 0]]  # 2, and 2 + log(2)
        [2.0, 2.693]
    """
    if _has_kernel(q, k, implementation):
        plan = _plan(q.shape, k.shape, causal, ids is not None)
        options: Any = {"segment_ids": ids, "return_lse": True}
        out, lse = zjax_kernels.sparse_attention(q, k, v, plan, **options)
        return out, lse.swapaxes(1, 2)
    queries = _group(q, k.shape[2])

    def add(carry: Any, chunk: Any) -> Any:
        top, total, out = carry
        keys, values, mask = chunk
        scores = jnp.where(mask, _scores(queries, keys), -jnp.inf)
        higher = jnp.maximum(top, scores.max(-1))
        level = jnp.where(jnp.isneginf(higher), 0.0, higher)
        shrink, p = jnp.exp(top - level), jnp.exp(scores - level[..., None])
        out = out * shrink[..., None] + _dot("blkgs,bskd->blkgd", p, values)
        return (higher, total * shrink + p.sum(-1), out), None

    zeros = jnp.zeros(queries.shape[:-1], jnp.float32)
    start = zeros - jnp.inf, zeros, jnp.zeros(queries.shape, jnp.float32)
    top, total, out = _over_keys(add, start, q, k, v, ids, causal)[0]
    some = jnp.where(total == 0, 1.0, total)
    lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(some))
    out = (out / some[..., None]).astype(q.dtype)
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


def gradients(
    q: Float[Array, "B L H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    d_out: Float[Array, "B L H D"],
    lse: Float[Array, "B L H"],
    delta: Float[Array, "B L H"],
    ids: Ids,
    *,
    causal: bool,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B L H D"], Float[Array, "B S K D"], Float[Array, "B S K D"]]:
    """Gradients of attention over these keys and others, as far as these give them.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        d_out: Cotangent of the averages over all keys.
        lse: Logarithms of the sums of exponentials over all keys, float32.
        delta: Sums over D of `d_out` times the averages, float32.
        ids: Documents.
        causal: Whether query i sees no key after i.
        implementation: `auto` uses kernels where they run, `xla` never.

    Returns:
        Gradients of `q`, `k` and `v`, float32.

    Example:
        >>> x, zeros = jnp.ones((1, 2, 1, 4)), jnp.zeros((1, 2, 1))
        >>> _, _, dv = gradients(x, x, x, x, zeros + 2.0, zeros, None, causal=True)
        >>> dv[0, :, 0, 0].tolist()
        [2.0, 1.0]
    """
    if _has_kernel(q, k, implementation):
        plan = _plan(q.shape, k.shape, causal, ids is not None)
        sums = lse.swapaxes(1, 2), delta.swapaxes(1, 2)
        dq, dk, dv = zjax_kernels.sparse_attention_gradients(
            q, k, v, plan, d_out, *sums, segment_ids=ids
        )
        return dq.astype(jnp.float32), dk.astype(jnp.float32), dv.astype(jnp.float32)
    queries, d_out = (_group(x, k.shape[2]) for x in (q, d_out))
    lse, delta = (x.reshape(*queries.shape[:-1], 1) for x in (lse, delta))

    def add(dq: Any, chunk: Any) -> Any:
        keys, values, mask = chunk
        p = jnp.where(mask, jnp.exp(_scores(queries, keys) - lse), 0.0)
        ds = p * (_dot("blkgd,bskd->blkgs", d_out, values) - delta)
        ds *= q.shape[-1] ** -0.5
        dk = _dot("blkgs,blkgd->bskd", ds, queries)
        dv = _dot("blkgs,blkgd->bskd", p, d_out)
        return dq + _dot("blkgs,bskd->blkgd", ds, keys), (dk, dv)

    start = jnp.zeros(queries.shape, jnp.float32)
    dq, (dk, dv) = _over_keys(add, start, q, k, v, ids, causal)
    dk, dv = (jnp.moveaxis(x, 0, 1).reshape(k.shape) for x in (dk, dv))
    return dq.reshape(q.shape), dk, dv


def _has_kernel(q, k, implementation):
    reason = "asked for" if implementation == "xla" else ""
    reason = reason or why_unsupported(q.dtype.name, q.shape[-1])
    odd = [x.shape[1] for x in (q, k) if x.shape[1] % BLOCK]
    if odd and not reason:
        reason = f"{odd[0]} tokens at a time are not whole blocks of {BLOCK}"
    _log("plain JAX" if reason else "kernels", reason or q.dtype.name)
    return not reason


@functools.cache
def _log(chosen, reason):
    logging.warning("ring attention: %s (%s)", chosen, reason)


@functools.cache
def _plan(queries, keys, causal, segments):
    rows, columns = queries[1] // BLOCK, keys[1] // BLOCK
    layout = zjax_kernels.BlockLayout.from_dense(
        np.ones((rows, columns), bool),
        block=BLOCK,
        num_heads=queries[2],
        causal=causal,
    )
    return zjax_kernels.make_plan(
        layout, num_kv_heads=keys[2], head_size=queries[3], segments=segments
    )


def _over_keys(add, carry, q, k, v, ids, causal):
    """Runs `add(carry, (keys, values, mask))` over chunks of keys."""
    length = k.shape[1]
    least = -(-length // CHUNK)
    number = next(n for n in range(least, length + 1) if length % n == 0)

    def cut(x):
        shape = x.shape[0], number, length // number, *x.shape[2:]
        return jnp.moveaxis(x.reshape(shape), 1, 0)

    def run(carry, chunk):
        keys, values, columns, key_ids = chunk
        mask = jnp.ones((), bool)
        if causal:
            rows = jnp.arange(q.shape[1])[None, :, None]
            mask = columns[:, None, :] <= rows
        if ids is not None:
            mask = mask & (ids[0][:, :, None] == key_ids[:, None, :])
        mask = mask[:, :, None, None, :] if mask.ndim else mask
        return add(carry, (keys, values, mask))

    columns = jnp.arange(length)[None]
    key_ids = columns if ids is None else ids[1]
    return jax.lax.scan(run, carry, tuple(map(cut, (k, v, columns, key_ids))))


def _group(x, num_kv_heads):
    return x.reshape(*x.shape[:2], num_kv_heads, -1, x.shape[-1])


def _scores(queries, keys):
    return _dot("blkgd,bskd->blkgs", queries, keys) * keys.shape[-1] ** -0.5


def _dot(equation, x, y):
    x = x.astype(y.dtype)
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)
