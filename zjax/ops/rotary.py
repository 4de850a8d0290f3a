"""Rotary position embedding, and frequencies slowed for long sequences."""

import math
import operator
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zjax.ops import invariant as ordered
from zjax.settings import schema


def scaled_frequencies(
    positions: Int[Array, "B L"],
    size: int,
    theta: float,
    scaling: schema.RopeScaling | None,
    num_tokens: Int[Array, " B"] | None = None,
    num_given: Int[Array, " B"] | None = None,
) -> Float[Array, "#B half"]:
    """Radians per position of each pair of channels, float32.

    `size` is the even number of channels that rotate, `theta` the base of wavelengths.
    `dynamic` depends on the longest position of a row, or on the `num_given` tokens of
    a prompt that is read in parts. `longrope` decides by `num_tokens`, the tokens of
    each row with tokens to come, by default up to the longest position.

    Example:
        >>> scaling = schema.LinearRope(factor=4.0)
        >>> scaled_frequencies(jnp.array([[0]]), 2, 10.0, scaling).tolist()
        [[0.25]]

    Reference:
        Linear: Chen et al. (arXiv:2306.15595); YaRN: Peng et al. (arXiv:2309.00071);
        Llama 3: Grattafiori et al. (arXiv:2407.21783); LongRoPE: Ding et al.
        (arXiv:2402.13753). The formulas are those of
        github.com/huggingface/transformers, whose LongRoPE decides by the longest row.
    """
    exponents = jnp.arange(0, size, 2, dtype=jnp.float32)[None] / size
    if isinstance(scaling, schema.DynamicRope):
        base = _dynamic_base(positions, size, theta, scaling, num_given)
        return base**-exponents
    frequencies = theta**-exponents
    if scaling is None:
        return frequencies
    if isinstance(scaling, schema.LinearRope):
        return frequencies / scaling.factor
    if isinstance(scaling, schema.Longrope):
        num_tokens = positions.max(1) + 1 if num_tokens is None else num_tokens
        is_long = num_tokens[:, None] > scaling.original_length
        short, long = jnp.array(scaling.short_factors), jnp.array(scaling.long_factors)
        return frequencies / jnp.where(is_long, long, short)
    if isinstance(scaling, schema.Yarn):
        share = _yarn_share(size, theta, scaling)
    else:
        share = _llama3_share(frequencies, scaling)
    return frequencies * (share + (1.0 - share) / scaling.factor)


def attention_factor(scaling: schema.RopeScaling | None) -> float:
    """Factor of rotated queries and of rotated keys.

    Example:
        >>> attention_factor(schema.Yarn(factor=1.0))
        1.0
    """
    if not isinstance(scaling, schema.Yarn | schema.Longrope):
        return 1.0
    if scaling.attention_factor:
        return scaling.attention_factor
    if isinstance(scaling, schema.Yarn):
        if scaling.mscale and scaling.mscale_all_dim:
            whole = _yarn_scale(scaling, scaling.mscale_all_dim)
            return _yarn_scale(scaling, scaling.mscale) / whole
        return _yarn_scale(scaling, 1.0)
    growth = math.log(max(scaling.factor, 1.0))
    return math.sqrt(1.0 + growth / math.log(scaling.original_length))


def score_factor(scaling: schema.RopeScaling | None) -> float:
    """Factor of attention scores besides the factor of rotated queries and keys.

    Example:
        >>> score_factor(schema.Yarn(factor=1.0, mscale_all_dim=1.0))
        1.0
    """
    if not isinstance(scaling, schema.Yarn):
        return 1.0
    return _yarn_scale(scaling, scaling.mscale_all_dim) ** 2


def _yarn_scale(scaling: schema.Yarn, share: float) -> float:
    """Factor by which YaRN sharpens attention over longer sequences."""
    return 0.1 * share * math.log(max(scaling.factor, 1.0)) + 1.0


def _dynamic_base(positions, size, theta, scaling, num_given) -> jax.Array:
    """Base of each row, [B, 1], by NTK-aware scaling of the row's length."""
    longest = positions.max(1, keepdims=True) + 1
    if num_given is not None:
        longest = jnp.maximum(longest, num_given[:, None])
    ratio = jnp.maximum(longest.astype(jnp.float32) / scaling.original_length, 1.0)
    growth = scaling.factor * ratio - (scaling.factor - 1.0)
    return theta * growth ** (size / (size - 2))


def _llama3_share(frequencies, scaling) -> jax.Array:
    """Share of each frequency that is not slowed."""
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    turns = scaling.original_length * frequencies / (2.0 * math.pi)
    return jnp.clip((turns - low) / (high - low), 0.0, 1.0)


def _yarn_share(size, theta, scaling) -> jax.Array:
    """Share of each frequency that is not slowed, 1 for the fastest channels."""

    def channel(turns: float) -> float:
        wavelength = scaling.original_length / (turns * 2.0 * math.pi)
        return size * math.log(wavelength) / (2.0 * math.log(theta))

    first, last = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    # As transformers: no division by 0.
    last += 0.001 * (first == last)
    channels = jnp.arange(size // 2, dtype=jnp.float32)[None]
    return 1.0 - jnp.clip((channels - first) / (last - first), 0.0, 1.0)


Pairs = Literal["halves", "adjacent"]
"""Channels that rotate together, as `model.positions.pairs` says."""


def make_rotary_tables(
    positions: Int[Array, "B L"],
    *,
    head_size: int,
    theta: float = 10_000.0,
    scaling: schema.RopeScaling | None = None,
    num_tokens: Int[Array, " B"] | None = None,
    num_given: Int[Array, " B"] | None = None,
    invariant: bool = False,
) -> tuple[Float[Array, "B L half"], Float[Array, "B L half"]]:
    """Computes cosines and sines of every position, float32, once for all layers.

    Positions are in the document, 0 or more. `head_size` is the even number of channels
    that rotate. With `invariant`, the numbers of a position are the same bits in all
    programs; the scaling may not depend on the length of rows.

    Reference:
        Su et al., RoFormer (arXiv:2104.09864).
    """
    factor = attention_factor(scaling)
    if invariant:
        # Before the program, in which the compiler may or may not fold constants.
        with jax.ensure_compile_time_eval():
            start = jnp.zeros((1, 1), jnp.int32)
            frequencies = scaled_frequencies(start, head_size, theta, scaling)
        angles = ordered.product(positions[..., None], frequencies[:, None, :])
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return ordered.product(cos, factor), ordered.product(sin, factor)
    given = positions, head_size, theta, scaling, num_tokens, num_given
    frequencies = scaled_frequencies(*given)
    # bfloat16 would merge positions above 256.
    angles = positions[..., None].astype(jnp.float32) * frequencies[:, None, :]
    return factor * jnp.cos(angles), factor * jnp.sin(angles)


def rotate(
    x: Float[Array, "B L H D"],
    cos: Float[Array, "#B L half"],
    sin: Float[Array, "#B L half"],
    pairs: Pairs = "halves",
    *,
    multiply: Callable[[jax.Array, jax.Array], jax.Array] = operator.mul,
    round_to: Callable[[jax.Array, Any], jax.Array] = jnp.astype,
) -> Float[Array, "B L H D"]:
    """Rotates the channel pairs of queries or keys by position, in float32.

    The tables come from `make_rotary_tables`; the result has the dtype of `x`. Channels
    beyond the tables are unchanged. Adjacent pairs come out as halves, which scores do
    not tell apart. `multiply` and `round_to` are the arithmetic.
    """
    half = cos.shape[-1]
    first, second, others = jnp.split(x, (half, 2 * half), axis=-1)
    if pairs == "adjacent":
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    rotated = (
        multiply(first, cos) - multiply(second, sin),
        multiply(second, cos) + multiply(first, sin),
    )
    rounded = [round_to(y, x.dtype) for y in rotated]
    return jnp.concatenate([*rounded, others], axis=-1)
