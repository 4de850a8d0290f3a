"""Optimizer moments stored in bfloat16 or int8, and updated in float32."""

import functools
import math
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int8, Int32, UInt8, UInt32

from zjax.optim.groups import Names, is_matrix, num_stacked
from zjax.optim.precision import cast_floating
from zjax.sharding.naming import layer_of, owners, path_of

_DROPPED_BITS = 20
"""Fraction bits of float32 (23) that an eight-bit float (3 fraction bits) lacks."""
_ONE = 127 << 3
"""Bit pattern of float32 1.0, shifted right by `_DROPPED_BITS`."""


class Quantized(NamedTuple):
    """A matrix in eight-bit floats, relative to scales of rows and columns.

    Unlike blocks, rows and columns stay whole when a matrix is sharded.

    Args:
        codes: int8[...], or uint8[...] if the numbers are never negative; 0 is 0.0.
        scales: float32 arrays, one for each dim that does not stack matrices: the
            largest magnitudes over all remaining dims, which have size 1.
    """

    codes: Any
    scales: tuple[Any, ...]


def random_bits(
    shape: tuple[int, ...], step: Int32[Array, ""], salt: int
) -> UInt32[Array, "..."]:
    """Draws one word of random bits per element, by hashing the element's index.

    The words depend on the step and on `salt`, an int from 0 to 2**32 - 1 for each
    array. The words are equal on every mesh, and need no communication.

    Reference:
        The finalizer of MurmurHash3 by Appleby.
    """
    seed = jnp.uint32(salt) + jnp.asarray(step).astype(jnp.uint32)
    # Seeds of neighbouring steps differ by 1; mixing them first gives unrelated words.
    index = jnp.broadcast_to(_mix(seed), shape)
    for dim in range(len(shape)):
        stride = jnp.uint32(math.prod(shape[dim + 1 :]) % 2**32)
        # An iota per dim is sharded like the array; the index wraps modulo 2**32.
        index += stride * jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
    return _mix(index)


def round_to_bfloat16(
    x: Float[Array, "..."], bits: UInt32[Array, "..."]
) -> Float[Array, "..."]:
    """Rounds float32[...] to a neighbouring bfloat16 number, to `x` on average.

    Rounding to nearest would lose every change below half of the gap between two
    numbers.

    Reference:
        Stochastic rounding, Gupta et al., arXiv:1502.02551.
    """
    # Adding 16 random bits and truncating rounds up with the right probability.
    words = jax.lax.bitcast_convert_type(x, jnp.uint32) + (bits >> 16)
    upper = jax.lax.bitcast_convert_type(words & jnp.uint32(0xFFFF0000), jnp.float32)
    return upper.astype(jnp.bfloat16)


def measure(x: Float[Array, "..."], shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Computes the largest magnitudes of float32[...] over the dims of size 1."""
    axes = tuple(dim for dim, size in enumerate(shape) if size == 1)
    return jnp.max(jnp.abs(x), axis=axes, keepdims=True)


def quantize(
    x: Float[Array, "..."],
    scales: tuple[Float[Array, "..."], ...],
    bits: UInt32[Array, "..."],
    dtype: Any,
) -> Quantized:
    """Rounds float32[...] to eight bits, to `x` on average.

    Signed codes reach from the scale down to 2**-16 of the scale, then to zero.
    Unsigned codes, for numbers that are not negative, reach down to 2**-32 of the
    scale; smaller numbers round up to this minimum, because a second moment of zero
    would be a divisor. `scales` come from `measure`.

    Reference:
        Scales of rows and columns: Li et al., arXiv:2309.01507. Optimizers in eight
        bits: Dettmers et al., arXiv:2110.02861.
    """
    relative = jnp.abs(x) * functools.reduce(jnp.maximum, map(_inverse, scales))
    max_code = jnp.iinfo(dtype).max
    words = jax.lax.bitcast_convert_type(relative, jnp.uint32)
    # Codes keep the exponent and three fraction bits; a random addend rounds
    # stochastically.
    words = (words + (bits >> (32 - _DROPPED_BITS))) >> _DROPPED_BITS
    # Code 0 is zero, hence the smallest magnitude is code 1.
    codes = jnp.clip(words.astype(jnp.int32) - (_ONE - max_code), 1, max_code)
    smallest = _value(jnp.ones((), dtype))
    signed = jnp.issubdtype(dtype, jnp.signedinteger)
    # Below the smallest code, 0 is drawn so often that the mean stays right.
    chance = (bits >> 8).astype(jnp.float32) * (2.0**-24 * smallest) if signed else 0.0
    codes = jnp.where(relative <= chance, 0, codes)
    return Quantized(jnp.where(x < 0, -codes, codes).astype(dtype), scales)


def dequantize(quantized: Quantized) -> Float[Array, "..."]:
    """Converts codes and scales to float32 in the shape of the codes."""
    # Row and column scale both bound an element; the smaller bound is finer.
    return _value(quantized.codes) * functools.reduce(jnp.minimum, quantized.scales)


def _inverse(scale: Float[Array, "..."]) -> Float[Array, "..."]:
    """Inverts scales, with 0 for 0.

    Scale arrays are small: the division runs once per row and column, not per element.
    """
    return jnp.where(scale > 0, 1 / jnp.where(scale > 0, scale, 1), 0)


def _value(codes: Int8[Array, "..."] | UInt8[Array, "..."]) -> Float[Array, "..."]:
    """Decodes eight-bit codes to signed float32 numbers relative to the scale."""
    max_code = jnp.iinfo(codes.dtype).max
    wide = codes.astype(jnp.int32)
    # The largest code is 1.0; eight codes halve the magnitude.
    words = (jnp.abs(wide) + (_ONE - max_code)) << _DROPPED_BITS
    return jnp.sign(wide) * jax.lax.bitcast_convert_type(words, jnp.float32)


def _mix(words: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Scrambles uint32[...] words by the finalizer of MurmurHash3."""
    words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
    return words ^ (words >> 16)


SECOND_MOMENT = "nu"
"""Field name of the second moment in optax states."""


class StoredMoments(NamedTuple):
    """State of `store_moments`.

    Args:
        count: int32[]; number of updates, which seeds the stochastic rounding.
    """

    count: Any
    state: Any


def store_moments(
    tx: optax.GradientTransformation, dtype: str, names: Names
) -> optax.GradientTransformationExtraArgs:
    """Stores the moments of a transformation in a smaller dtype between updates.

    `dtype` is `float32`, `bfloat16` or `int8`; in `int8`, vectors stay float32.
    Floating state in the shape of a parameter counts as a moment, and under `nu` as a
    second moment. The update itself is computed in float32, and returned in the dtypes
    of the gradients.
    """
    inner = optax.with_extra_args_support(tx)

    def init(params: Any) -> StoredMoments:
        leaves = jax.tree_util.tree_leaves_with_path(params)
        shapes = {path_of(keys): (path_of(keys), leaf.shape) for keys, leaf in leaves}
        state = jax.tree_util.tree_map_with_path(
            lambda keys, leaf: _init_stored(keys, leaf, shapes, dtype, names),
            inner.init(cast_floating(params, jnp.float32)),
        )
        return StoredMoments(jnp.zeros((), jnp.int32), state)

    def update(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, StoredMoments]:
        def advance(updates: Any, stored: Any) -> tuple[Any, Any]:
            wide = None if params is None else cast_floating(params, jnp.float32)
            moments = jax.tree.map(_load, stored, is_leaf=_is_quantized)
            updates = cast_floating(updates, jnp.float32)
            return inner.update(updates, moments, wide, **extra)

        stored, scales = state.state, []
        for dim in range(_num_scales(stored)):
            # Updates once more for each scale: a scale needs the largest new moment of
            # a row or column, and all moments in float32 take too much memory. Without
            # the barrier XLA would keep the moments of one pass for the next one.
            found = _measure(stored, advance(updates, stored)[1], dim)
            stored, found = jax.lax.optimization_barrier((stored, found))
            scales.append(found)
        wide, after = advance(updates, stored)
        wide = jax.tree.map(lambda new, old: new.astype(old.dtype), wide, updates)
        count = jnp.asarray(optax.safe_increment(state.count))
        return wide, StoredMoments(count, _store(stored, after, scales, count))

    return optax.GradientTransformationExtraArgs(init, update)


def _is_quantized(node: Any) -> bool:
    """Whether a node holds codes with scales; else it is a plain array."""
    return isinstance(node, Quantized)


def _init_stored(
    keys: Any, leaf: Any, shapes: Mapping[str, Any], dtype: str, names: Names
) -> Any:
    """Returns the stored form of a leaf of the inner state, filled with zeros."""
    # Counters, scalars and factored state are in no parameter's shape, and stay.
    path = next((p for p, s in owners(keys, shapes) if s == leaf.shape), None)
    if path is None or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    if dtype != "int8":
        return jnp.zeros(leaf.shape, dtype)
    # Vectors take little memory, and have no rows and columns to scale.
    if not is_matrix(path, leaf.ndim, names):
        return leaf
    # Second moments are never negative: uint8 spends the sign bit on a wider range.
    squares = any(getattr(key, "name", None) == SECOND_MOMENT for key in keys)
    stacked = num_stacked(path, names)
    scales = tuple(
        jnp.zeros(
            [n if d in (*range(stacked), dim) else 1 for d, n in enumerate(leaf.shape)],
            jnp.float32,
        )
        for dim in range(stacked, leaf.ndim)
    )
    return Quantized(jnp.zeros(leaf.shape, jnp.uint8 if squares else jnp.int8), scales)


def _load(leaf: Any) -> Any:
    """Widens a stored leaf to float32; counters and keys stay."""
    if _is_quantized(leaf):
        return dequantize(leaf)
    return leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf


def _num_scales(stored: Any) -> int:
    """Counts the scales of the quantized moment with most scales."""
    forms = jax.tree.leaves(stored, is_leaf=_is_quantized)
    return max((len(form.scales) for form in forms if _is_quantized(form)), default=0)


def _measure(stored: Any, state: Any, number: int) -> Any:
    """Computes scale `number` of each quantized moment; None if a moment has fewer."""

    def scale(form: Any, leaf: Any) -> Any:
        if not _is_quantized(form) or number >= len(form.scales):
            return None
        return measure(leaf, form.scales[number].shape)

    return jax.tree.map(scale, stored, state, is_leaf=_is_quantized)


def _store(stored: Any, state: Any, scales: list[Any], step: Int32[Array, ""]) -> Any:
    """Converts a state to the dtypes in which `stored` holds it."""

    def store(keys: Any, form: Any, leaf: Any, *found: Any) -> Any:
        if not _is_quantized(form) and form.dtype == leaf.dtype:
            return leaf
        # The salt is a CRC because `hash` of a string differs between processes.
        name = f"{path_of(keys)} {layer_of(keys)}"
        bits = random_bits(leaf.shape, step, zlib.crc32(name.encode()))
        if _is_quantized(form):
            scales = found[: len(form.scales)]
            return quantize(leaf, scales, bits, form.codes.dtype)
        return round_to_bfloat16(leaf, bits)

    trees = stored, state, *scales
    return jax.tree_util.tree_map_with_path(store, *trees, is_leaf=_is_quantized)
