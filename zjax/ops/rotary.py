"""Rotary position embedding: positions as rotations of pairs of channels.

Channel i of the first half of a head is paired with channel i of the second half, the
layout of the published Llama weights in the Hugging Face format, or channel 2 i with
its neighbour, as in the paper and in DeepSeek.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zjax.config import schema
from zjax.ops.rope_scaling import attention_factor, scaled_frequencies

Pairs = Literal["halves", "adjacent"]
"""Channels that rotate together, as `model.rotary_pairs` says."""
UNSCALED = schema.RopeScaling()


def make_rotary_tables(
    positions: Int[Array, "B L"],
    *,
    head_size: int,
    theta: float = 10_000.0,
    scaling: schema.RopeScaling = UNSCALED,
    num_tokens: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B L half"], Float[Array, "B L half"]]:
    """Computes cosines and sines of every position, float32, once for all layers.

    Args:
        positions: Position of each token in its document, 0 or more.
        head_size: Channels per head that rotate, even.
        theta: Base of the wavelengths, above 1.
        scaling: How rotations are slowed; not by default.
        num_tokens: Tokens of each row with those to come; up to its longest position by
            default.

    Example:
        >>> cos, sin = make_rotary_tables(jnp.array([[0, 1]]), head_size=4)
        >>> cos.shape, float(sin[0, 0, 0])
        ((1, 2, 2), 0.0)

    Reference:
        Su et al., RoFormer (arXiv:2104.09864).
    """
    given = positions, head_size, theta, scaling, num_tokens
    frequencies = scaled_frequencies(*given)
    angles = positions[..., None].astype(jnp.float32) * frequencies[:, None, :]
    factor = attention_factor(scaling)
    return factor * jnp.cos(angles), factor * jnp.sin(angles)


def rotate(
    x: Float[Array, "B L H D"],
    cos: Float[Array, "#B L half"],
    sin: Float[Array, "#B L half"],
    pairs: Pairs = "halves",
) -> Float[Array, "B L H D"]:
    """Rotates the channel pairs of queries or keys by their positions, in float32.

    The tables are those of `make_rotary_tables`; the result has the dtype of `x`.
    Channels beyond those of the tables stay as they are. Adjacent pairs come out as
    halves, which scores do not tell apart.

    Example:
        >>> tables = make_rotary_tables(jnp.array([[0]]), head_size=2)
        >>> rotate(jnp.ones((1, 1, 1, 3)), *tables).tolist()
        [[[[1.0, 1.0, 1.0]]]]
        >>> rotate(jnp.arange(4.0).reshape(1, 1, 1, 4), *make_rotary_tables(
        ...     jnp.array([[0]]), head_size=4), "adjacent").tolist()
        [[[[0.0, 2.0, 1.0, 3.0]]]]
    """
    half = cos.shape[-1]
    first, second, others = jnp.split(x, (half, 2 * half), axis=-1)
    if pairs == "adjacent":
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate([y.astype(x.dtype) for y in (*rotated, others)], axis=-1)
