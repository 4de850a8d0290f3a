"""DeepSpeed's sparse self-attention under its names, with arrays [B, S, H, D].

A query that sees no key gets 0, where DeepSpeed gives NaN.

Reference: DeepSpeed, `ops/sparse_attention/sparse_self_attention.py`.
"""

from typing import Any, Literal

import jax.core as jax_core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from zjax.errors import ConfigError, Problem
from zjax.ops.sparse import Sparse, sparse_attention

Mode = Literal["add", "mul"]
MASK_THRESHOLD = -9_000.0
"""Additive masks hide a key at or below this; -10000 is -9984 in bfloat16."""


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
    attn_mask_mode: Mode = "mul",
) -> Float[Array, "B S H D"]:
    """Sparse attention with DeepSpeed's masks, multiplicative or additive.

    In mode `mul`, 0 masks. In mode `add`, -9000 or less masks, and every other number
    must be 0.

    Args:
        query: Queries.
        key: Keys.
        value: Values.
        sparse: The pattern and its longest sequence.
        rpe: Relative position bias; refused.
        key_padding_mask: Mask [B, S] or [B, 1, 1, S] of keys. If it is traced, a number
            that is neither 0 nor masks makes its row NaN.
        attn_mask: Mask [S, S] of pairs; a concrete array.
        key_padding_mask_mode: Mode of `key_padding_mask`.
        attn_mask_mode: Mode of `attn_mask`.

    Returns:
        The weighted values of each query and head.

    Raises:
        NotImplementedError: `rpe` is given, or `attn_mask` is traced.
        ConfigError: Shapes do not agree, a mask cannot be used, or the sequence is
            longer than the layout.

    Example:
        >>> from zjax_kernels import BigBird
        >>> x = jnp.ones((1, 100, 2, 8))
        >>> earlier = np.tri(100)
        >>> self_attention(x, x, x, Sparse(BigBird(2), 128), attn_mask=earlier).shape
        (1, 100, 2, 8)
    """
    _check_modes(key_padding_mask_mode, attn_mask_mode)
    _check_heads(query, key, value, sparse.pattern.num_heads)
    _check_scores(rpe, attn_mask)
    batch, length = query.shape[:2]
    masks: dict[str, Any] = {}
    invalid = None
    if attn_mask is not None:
        shape = length, length
        masks["mask"], _ = _read_mask("attn_mask", attn_mask, attn_mask_mode, shape)
    if key_padding_mask is not None:
        name, mode = "key_padding_mask", key_padding_mask_mode
        visible, invalid = _read_mask(name, key_padding_mask, mode, (batch, length))
        masks["key_mask"] = jnp.asarray(visible)
    out = sparse_attention(query, key, value, sparse, **masks)
    if invalid is None:
        return out
    return jnp.where(invalid.any(axis=1)[:, None, None, None], jnp.nan, out)


def _check_modes(key_mode, score_mode):
    modes = {"key_padding_mask_mode": key_mode, "attn_mask_mode": score_mode}
    problems = [
        Problem(name, mode, "is not a mode", "use 'add' or 'mul'")
        for name, mode in modes.items()
        if mode not in ("add", "mul")
    ]
    if problems:
        raise ConfigError(*problems)


def _check_heads(query, key, value, num_heads):
    shape = jnp.shape(query)
    if len(shape) != 4 or 0 in shape or shape[2] != num_heads:
        problem = f"is not [batch, tokens, {num_heads}, channels]"
        remedy = "give one or more of each, and the heads of the pattern third"
        raise ConfigError(Problem("query.shape", shape, problem, remedy))
    for name, x in (("key", key), ("value", value)):
        if jnp.shape(x)[:2] + jnp.shape(x)[3:] != shape[:2] + shape[3:]:
            problem = f"is not [{shape[0]}, {shape[1]}, heads, {shape[3]}]"
            remedy = "give one for each of the queries"
            raise ConfigError(Problem(f"{name}.shape", jnp.shape(x), problem, remedy))


def _check_scores(rpe, attn_mask):
    if rpe is not None:
        raise NotImplementedError(
            f"rpe.shape={jnp.shape(rpe)} cannot be added to the scores of blocks; give "
            "what only masks to zjax_kernels.make_plan(..., mask=), or use "
            "jax.nn.dot_product_attention(..., bias=)"
        )
    if isinstance(attn_mask, jax_core.Tracer):
        raise NotImplementedError(
            f"attn_mask.shape={attn_mask.shape} is known only while the program runs; "
            "close over an array, or make a plan before with "
            "zjax_kernels.make_plan(..., mask=)"
        )


def _read_mask(name, mask, mode, shape):
    """Where a mask leaves keys visible and, if it is traced, where it is invalid."""
    is_traced = isinstance(mask, jax_core.Tracer)
    mask = mask if is_traced else np.asarray(mask)
    if [n for n in mask.shape if n != 1] != [n for n in shape if n != 1]:
        problem, remedy = f"is not {shape}", "give one number for each"
        raise ConfigError(Problem(f"{name}.shape", mask.shape, problem, remedy))
    mask = mask.reshape(shape)
    if mode == "mul":
        return mask != 0, None
    remedy = f"use 0.0 and -10000.0, or {name}_mode='mul'"
    if not jnp.issubdtype(mask.dtype, jnp.floating):
        problem = "is not a floating dtype, as additive masks need"
        raise ConfigError(Problem(f"{name}.dtype", mask.dtype.name, problem, remedy))
    visible, invalid = mask > MASK_THRESHOLD, (mask != 0) & ~(mask <= MASK_THRESHOLD)
    if is_traced:
        return visible, invalid
    if invalid.any():
        problem = "neither masks a key nor leaves it visible"
        raise ConfigError(Problem(name, float(mask[invalid][0]), problem, remedy))
    return visible, None
