"""Ulysses: attention over whole sequences, on some heads per device.

Outside of attention each device holds some tokens of every sequence. All-to-alls move
queries, keys and values from all heads of some tokens to all tokens of some heads, and
move the averages back: four per pass, whose size per device falls with the number of
devices. Each is a pair of placements, pinned in order, so that gradients move the same
way back.

Reference: Jacobs et al., DeepSpeed Ulysses (arXiv:2309.14509), section 3.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Shaped

from zjax.ops.attention import ATTENTION_OUTPUT
from zjax.sharding import mesh as meshes
from zjax.sharding import rules
from zjax.sharding.activations import open_size, pin, row_axes


def ulysses_attention(
    attend: Callable[..., Float[Array, "B L H D"]],
    q: Float[Array, "B L H D"],
    k: Float[Array, "B L K D"],
    v: Float[Array, "B L K D"],
    *per_token: Shaped[Array, "B L"] | None,
) -> Float[Array, "B L H D"]:
    """Runs attention with heads split over tensor and sequence axis together.

    Heads of keys and values that are too few are repeated.

    Args:
        attend: `attend(q, k, v, *per_token)`, by any kernel.
        q: Queries, their length split over the sequence axis of the mesh in use. The
            two axes together divide H.
        k: Keys.
        v: Values.
        per_token: Arrays that every head reads for the whole sequence, or None.

    Returns:
        The averages, their length split again.

    Example:
        >>> from zjax.ops.attention import dot_product_attention
        >>> x = jnp.ones((1, 3, 2, 4))
        >>> attend = lambda *qkv: dot_product_attention(*qkv, causal=True)
        >>> ulysses_attention(attend, x, x, x).shape
        (1, 3, 2, 4)
    """
    if open_size(meshes.SEQUENCE) == 1:
        return attend(q, k, v, *per_token)
    rows = rules.entry(row_axes(q.shape[0]))
    tensor = meshes.TENSOR if open_size(meshes.TENSOR) > 1 else None
    heads = (meshes.SEQUENCE,) if tensor is None else (tensor, meshes.SEQUENCE)
    repeats = num_repeats(k.shape[2])

    def to_heads(x: jax.Array) -> jax.Array:
        x = pin(x, rows, meshes.SEQUENCE, tensor)
        return pin(x, rows, None, rules.entry(heads))

    def to_tokens(x: jax.Array) -> jax.Array:
        x = pin(x, rows, None, rules.entry(heads))
        return pin(x, rows, meshes.SEQUENCE, tensor)

    def gathered(x: Any) -> Any:
        return None if x is None else pin(x, rows, None)

    k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))
    averages = attend(*map(to_heads, (q, k, v)), *map(gathered, per_token))
    # Saved after the all-to-all, or recomputation would repeat it.
    return checkpoint_name(to_tokens(averages), ATTENTION_OUTPUT)


def num_repeats(num_kv_heads: int) -> int:
    """How often heads of keys and values are repeated so that devices share them.

    Example:
        >>> num_repeats(2)
        1
    """
    shares = open_size(meshes.TENSOR) * open_size(meshes.SEQUENCE)
    return shares // math.gcd(num_kv_heads, shares)
