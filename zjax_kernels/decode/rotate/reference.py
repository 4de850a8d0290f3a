"""Rotation and writes in jax.numpy: the specification of the kernel, on any device."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from zjax_kernels.decode.cache import write_pages


class Operands(NamedTuple):
    """Arrays of a call.

    Args:
        product: [N, H + 2 KV, D] queries, keys and values of tokens.
        bias: [H + 2 KV, D] that is added to the product, or None.
        norms: [D] scales of the RMS norms of queries and of keys, or None.
        rotation: float32[N, half] cosines and sines, or None.
        pages: int32[N, P], pages of the row of each token.
        starts: int32[N], position of each token.
        counts: int32[N], 1 for tokens that are written, or 0.
    """

    product: Array
    bias: Array | None
    norms: tuple[Array, Array] | None
    rotation: tuple[Array, Array] | None
    pages: Array
    starts: Array
    counts: Array


@dataclasses.dataclass(frozen=True)
class Options:
    """Static choices of a call.

    Args:
        num_queries: H, heads of queries.
        eps: Number added to the mean square of the norms.
        query_scale: Factor of the rotated queries.
        early: Whether the kernel starts before the last kernels end.
    """

    num_queries: int
    eps: float = 0.0
    query_scale: float = 1.0
    early: bool = False


def rotate_and_write(
    operands: Operands, keys: Array, values: Array, options: Options
) -> tuple[Array, Array, Array]:
    """Returns queries [N, 1, H, D], and pools with the keys and values of tokens."""
    x, first_key = operands.product, options.num_queries
    if operands.bias is not None:
        x += operands.bias[None]
    first_value = first_key + keys.shape[1]
    q, k, v = x[:, :first_key], x[:, first_key:first_value], x[:, first_value:]
    if operands.norms is not None:
        q, k = (
            _normalize(each, scale, options.eps)
            for each, scale in zip((q, k), operands.norms, strict=True)
        )
    if operands.rotation is not None:
        q, k = (_rotate(each, *operands.rotation) for each in (q, k))
    if options.query_scale != 1.0:
        q = (q * options.query_scale).astype(q.dtype)
    where = operands.pages, operands.starts, operands.counts
    keys = write_pages(keys, k[:, None], *where)
    return q[:, None], keys, write_pages(values, v[:, None], *where)


def _normalize(x: Array, scale: Array, eps: float) -> Array:
    """Normalises the channels of each head, in float32."""
    wide = x.astype(jnp.float32)
    mean = jnp.square(wide).mean(axis=-1, keepdims=True)
    scaled = wide * lax.rsqrt(mean + eps) * scale.astype(jnp.float32)[None, None]
    return scaled.astype(x.dtype)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates pairs of channels that lie `half` channels apart, in float32."""
    half = cos.shape[-1]
    first, second, others = jnp.split(x, (half, 2 * half), axis=-1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    cos, sin = cos[:, None], sin[:, None]
    rotated = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate([y.astype(x.dtype) for y in (*rotated, others)], axis=-1)
