"""Attention as one operation with its FLOPs, in programs that are traced to be counted.

Every kind of attention states its cost here, on all devices alike: a traced program
shows no kernel, and no mask shows that half of the pairs are hidden.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from zjax_kernels import abstract


class Pairs(NamedTuple):
    """Pairs of a query and a key that attention computes, and that it stores."""

    computed: float
    """Fraction of all pairs whose scores are needed, all later keys included."""
    seen: float
    """Fraction of all pairs in which the query sees the key."""
    num_bytes: int = 0
    """Bytes stored per pair and head for the backward pass; 0 for a kernel."""


def abstract_attention(
    q: Float[Array, "B L H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    pairs: Pairs,
    *,
    name: str,
    value_size: int = 0,
) -> Float[Array, "B L H D"]:
    """Traces attention as one operation; `name` is the name of the residuals.

    A head has `value_size` channels of values, then padding; 0 means no padding.
    """
    return _attend(pairs, name, value_size or v.shape[-1], q, k, v)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(pairs, name, value_size, q, k, v):
    return _forward(pairs, name, value_size, q, k, v)[0]


def _forward(pairs, name, value_size, q, k, v):
    """Returns the outputs, and what the backward pass reads."""
    rows, length, heads, size = q.shape
    scores = rows, heads, length, k.shape[1]
    channels = size + value_size
    results = [
        jax.ShapeDtypeStruct((*q.shape[:3], v.shape[-1]), q.dtype),
        jax.ShapeDtypeStruct(scores[:3], jnp.float32),  # sums of the softmax
        jax.ShapeDtypeStruct((*scores, pairs.num_bytes), jnp.uint8),
    ]
    flops = abstract.product_flops(*scores, channels)
    outputs, sums, stored = abstract.call(
        (q, k, v),
        results,
        flops=pairs.computed * flops,
        causal_flops=pairs.seen * flops,
    )
    outputs, sums = (checkpoint_name(x, name) for x in (outputs, sums))
    return outputs, (q, k, v, outputs, sums, stored)


def _backward(pairs, name, value_size, saved, cotangent):
    """Returns cotangents; FLOPs of gradients follow from the forward pass."""
    del pairs, name, value_size
    return tuple(abstract.call((*saved, cotangent), saved[:3], flops=0.0))


_attend.defvjp(_forward, _backward)
