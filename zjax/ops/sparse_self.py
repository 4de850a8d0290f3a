"""DeepSpeed's sparse self-attention under its names, in JAX's order.

Sequences come before heads: [B, S, H, D]. A query that sees no key has 0, not NaN.

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
    attn_mask_mode: Mode = "mul",
) -> Float[Array, "B S H D"]:
    """Attention with the masks of DeepSpeed, in either of their forms.

    Under `mul`, 0 masks. Under `add`, a number of -9000 or less does, and the others
    must be 0.

    Args:
        query: Queries.
        key: Keys.
        value: Values.
        sparse: The pattern and its longest sequence.
        rpe: Refused.
        key_padding_mask: [B, S] or [B, 1, 1, S], which keys all queries of a row see.
            What neither masks nor leaves a key makes NaN of the row where it cannot be
            told before the program runs.
        attn_mask: [S, S], which keys each query sees; known before the program runs.
        key_padding_mask_mode: What the numbers of `key_padding_mask` mean.
        attn_mask_mode: What the numbers of `attn_mask` mean.

    Returns:
        One average per query and head.

    Raises:
        NotImplementedError: `rpe` is given, or `attn_mask` is known only later.
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
    unclear = None
    if attn_mask is not None:
        shape = length, length
        masks["mask"], _ = _read("attn_mask", attn_mask, attn_mask_mode, shape)
    if key_padding_mask is not None:
        name, mode = "key_padding_mask", key_padding_mask_mode
        visible, unclear = _read(name, key_padding_mask, mode, (batch, length))
        masks["key_mask"] = jnp.asarray(visible)
    out = sparse_attention(query, key, value, sparse, **masks)
    if unclear is None:
        return out
    return jnp.where(unclear.any(axis=1)[:, None, None, None], jnp.nan, out)


def _check_modes(of_keys, of_scores):
    given = {"key_padding_mask_mode": of_keys, "attn_mask_mode": of_scores}
    found = [
        Problem(name, mode, "is no mode", "use 'add' or 'mul'")
        for name, mode in given.items()
        if mode not in ("add", "mul")
    ]
    if found:
        raise ConfigError(*found)


def _check_heads(query, key, value, num_heads):
    """Raises what is wrong with the shapes."""
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
    """Raises what would have to be added to scores, or is not known in time."""
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


def _read(name, mask, mode, shape):
    """Where a mask hides nothing, and where a traced one does neither that nor hide."""
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
        problem = "is none of numbers that are added to scores"
        raise ConfigError(Problem(f"{name}.dtype", mask.dtype.name, problem, remedy))
    visible, unclear = mask > MASKS, (mask != 0) & ~(mask <= MASKS)
    if is_traced:
        return visible, unclear
    if unclear.any():
        problem = "neither masks a key nor leaves it"
        raise ConfigError(Problem(name, float(mask[unclear][0]), problem, remedy))
    return visible, None
