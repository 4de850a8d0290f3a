"""DeepSpeed's sparse self-attention under its names, in JAX's order.

Sequences come before heads: [B, S, H, D]. A query that sees no key has 0, not NaN.

Reference: DeepSpeed, `ops/sparse_attention/sparse_self_attention.py`.
"""

from typing import Any, Literal

import jax.core as jax_core
import jax.numpy as jnp
from jaxtyping import Array, Float

from zjax.ops.sparse import Sparse, sparse_attention

Mode = Literal["add", "mul"]
MASKS = -9_000.0
"""An added number from here down masks; -10000 is -9984 in bfloat16."""


def self_attention(
    query: Float[Array, "B S H D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K D"],
    sparse: Sparse,
    *,
    rpe: Any = None,
    key_padding_mask: Any = None,
    attn_mask: Any = None,
    key_padding_mask_mode: Mode = "add",
) -> Float[Array, "B S H D"]:
    """Attention with a key padding mask in either of DeepSpeed's forms.

    Args:
        query: Queries.
        key: Keys.
        value: Values.
        sparse: The pattern and its longest sequence.
        rpe: Refused.
        key_padding_mask: [B, S]. Under `mul`, 0 masks a key; under `add`, a number of
            -9000 or less does, and the others must be 0. What is neither makes NaN of
            the row where it cannot be told before the program runs.
        attn_mask: Refused.
        key_padding_mask_mode: What the numbers mean.

    Returns:
        One average per query and head.

    Raises:
        NotImplementedError: `rpe` or `attn_mask` is given.
        ValueError: The mask cannot be used, or the sequence is longer than the layout.

    Example:
        >>> from zjax_kernels import BigBird
        >>> x = jnp.ones((1, 100, 2, 8))
        >>> self_attention(x, x, x, Sparse(BigBird(2), 128)).shape
        (1, 100, 2, 8)
    """
    for name, given in (("rpe", rpe), ("attn_mask", attn_mask)):
        if given is not None:
            raise NotImplementedError(
                f"{name} of shape {jnp.shape(given)} cannot be added to the scores of "
                "blocks; put a mask into the layout, as zjax_kernels.BlockLayout."
                "from_dense reads it, or use jax.nn.dot_product_attention"
            )
    if key_padding_mask_mode not in ("add", "mul"):
        raise ValueError(
            f"key_padding_mask_mode={key_padding_mask_mode!r} is no mode; use add, mul"
        )
    if key_padding_mask is None:
        return sparse_attention(query, key, value, sparse)
    mask = jnp.asarray(key_padding_mask)
    if mask.shape != query.shape[:2]:
        raise ValueError(
            f"key_padding_mask.shape={mask.shape} is not {query.shape[:2]}; give one "
            "number per key"
        )
    if key_padding_mask_mode == "mul":
        return sparse_attention(query, key, value, sparse, key_mask=mask != 0)
    visible = mask > MASKS
    unclear = visible & (mask != 0)
    if not isinstance(unclear, jax_core.Tracer) and unclear.any():
        raise ValueError(
            f"key_padding_mask={mask[unclear][0]} neither masks a key nor leaves it; "
            "use 0 and -10000, or key_padding_mask_mode='mul'"
        )
    out = sparse_attention(query, key, value, sparse, key_mask=visible)
    return jnp.where(unclear.any(axis=1)[:, None, None, None], jnp.nan, out)
