"""Rotary position embedding: positions as rotations of pairs of channels.

Channel i of the first half of a head is paired with channel i of the second half, the
layout of the published Llama weights in the Hugging Face format.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def make_rotary_tables(
    positions: Int[Array, "B L"], *, head_size: int, theta: float = 10_000.0
) -> tuple[Float[Array, "B L half"], Float[Array, "B L half"]]:
    """Computes cosines and sines of every position, float32, once for all layers.

    Args:
        positions: Position of each token in its document, 0 or more.
        head_size: Channels per head, even.
        theta: Base of the wavelengths, above 1.

    Example:
        >>> cos, sin = make_rotary_tables(jnp.array([[0, 1]]), head_size=4)
        >>> cos.shape, float(sin[0, 0, 0])
        ((1, 2, 2), 0.0)

    Reference:
        Su et al., RoFormer (arXiv:2104.09864).
    """
    exponents = jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size
    frequencies = (theta**-exponents)[None, None, :]
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "B L H D"],
    cos: Float[Array, "#B L half"],
    sin: Float[Array, "#B L half"],
) -> Float[Array, "B L H D"]:
    """Rotates the channel pairs of queries or keys by their positions, in float32.

    The tables are those of `make_rotary_tables`; the result has the dtype of `x`.

    Example:
        >>> tables = make_rotary_tables(jnp.array([[0]]), head_size=2)
        >>> rotate(jnp.ones((1, 1, 1, 2)), *tables).tolist()
        [[[[1.0, 1.0]]]]
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
