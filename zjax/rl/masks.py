"""Masked arrays: positions outside a mask reach neither values nor gradients."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def at_least_float32(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Casts every dtype but float64 to float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def masked(x: Float[Array, "*#S"], mask: Bool[Array, "*S"]) -> Float[Array, "*S"]:
    """Returns `x`, float32 or wider, with 0 outside the mask.

    A function must mask inputs, not outputs: the derivative of an exponential at NaN is
    NaN, and 0 times NaN is NaN.

    Example:
        >>> masked(jnp.array([[1.5, jnp.nan]]), jnp.array([[True, False]])).tolist()
        [[1.5, 0.0]]
    """
    return jnp.where(mask, at_least_float32(x), 0)


def segment_mean(
    x: Float[Array, "B L"],
    mask: Bool[Array, "B L"],
    segment_ids: Int[Array, "B L"] | None = None,
) -> Float[Array, " B #L"]:
    """Averages each segment over the tokens of the mask; 0 for one without tokens.

    A row is one segment, or several: runs of equal `segment_ids`.

    Example:
        >>> x, mask = jnp.array([[1.0, 3.0, jnp.inf]]), jnp.array([[True, True, False]])
        >>> segment_mean(x, mask).tolist()
        [[2.0]]
        >>> segment_mean(x, mask, jnp.array([[1, 2, 2]])).tolist()
        [[1.0, 3.0, 3.0]]
    """
    sums = segment_sum(masked(x, mask), segment_ids)
    return sums / jnp.maximum(segment_sum(mask.astype(sums.dtype), segment_ids), 1)


def segment_sum(
    x: Float[Array, "B L"], segment_ids: Int[Array, "B L"] | None = None
) -> Float[Array, " B #L"]:
    """Sums each segment, a row or a run of equal `segment_ids`, at every token.

    Example:
        >>> x = jnp.array([[1.0, 2.0, 4.0]])
        >>> segment_sum(x).tolist()
        [[7.0]]
        >>> segment_sum(x, jnp.array([[1, 1, 2]])).tolist()
        [[3.0, 3.0, 4.0]]
    """
    if segment_ids is None:
        return x.sum(1, keepdims=True)
    begins = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1] - 1) != 0

    def add(before, after):
        sums, begins = after
        return jnp.where(begins, sums, before[0] + sums), before[1] | begins

    # Differences of sums over a whole row would cancel digits of short sequences.
    sums, _ = jax.lax.associative_scan(add, (x, begins), axis=1)
    length = x.shape[1]
    ends = jnp.pad(begins[:, 1:], [(0, 0), (0, 1)], constant_values=True)
    places = jnp.where(ends, jnp.arange(length)[None, :], length)
    last = jax.lax.cummin(places, axis=1, reverse=True)
    return jnp.take_along_axis(sums, last, axis=1)
