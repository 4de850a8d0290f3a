"""Thresholds of top-k and top-p, and the best tokens, in jax.numpy."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

LOWEST, HIGHEST = 0x007FFFFF, 0xFF800000
"""Codes of -inf and inf, by `_float_of`."""
NUM_LIMBS = 3
"""Number of integers of a weight, of 12 bits each in a vocabulary of 2^18 tokens."""


def top_k_threshold(logits: Array, wanted: Array) -> Array:
    """Returns float32[R], the `wanted`-th largest logit of each row.

    `logits` are float32[R, V], and `wanted` int32[R] from 1 to V.
    """

    def has_enough(thresholds):
        return jnp.sum(logits >= thresholds[:, None], axis=1) >= wanted

    return _largest_threshold(has_enough, logits.shape[0])


def top_p_threshold(logits: Array, weights: Array, wanted: Array) -> Array:
    """Returns float32[R], the largest threshold whose logits weigh `wanted` or more.

    `logits` and `weights`, which are from 0 to 1, are float32[R, V], `wanted`
    float32[R].
    """

    def has_enough(thresholds):
        kept = jnp.where(logits >= thresholds[:, None], weights, 0)
        return exact_sum(kept) >= wanted

    return _largest_threshold(has_enough, logits.shape[0])


def find_best(logits: Array, number: int, counts: Array) -> tuple[Array, Array]:
    """Returns the `number` largest logits of each row, and the ids, as `lax.top_k`."""
    del counts  # a sort finds all at once
    values, ids = jax.lax.top_k(logits, number)
    return values, ids


def exact_sum(weights: Array) -> Array:
    """Sums weights [R, V] up to 1 of each row, alike in every order of the additions.

    Each weight is cut into integers, as a sum of floats depends on the shape of the
    program and on its devices, and a filter must not.
    """
    num_bits = bits_of_limb(weights.shape[1])
    total, rest = jnp.zeros(weights.shape[0], jnp.float32), weights
    for number in range(NUM_LIMBS):
        rest = rest * 2.0**num_bits
        limb = jnp.floor(rest)
        rest = rest - limb
        sums = limb.astype(jnp.int32).sum(axis=1)
        total += sums.astype(jnp.float32) * 2.0 ** (-num_bits * (number + 1))
    return total


def bits_of_limb(vocab_size: int) -> int:
    """Returns the bits of a limb, so that sums of a vocabulary are int32."""
    return 31 - vocab_size.bit_length()


def _largest_threshold(holds: Callable[[Array], Array], num_rows: int) -> Array:
    """Searches the largest thresholds that satisfy a condition, float32[R].

    `holds(float32[R]) -> bool[R]` holds up to a threshold of each row, at -inf at
    least, and never at inf. The result is exact: 16 rounds find 2 bits each.
    """
    low, highest = (jnp.full(num_rows, x, jnp.uint32) for x in (LOWEST, HIGHEST))

    def refine(number, low):
        shift = jnp.uint32(30) - 2 * jnp.uint32(number)
        steps = [jnp.uint32(step) << shift for step in (1, 2, 3)]
        # The sums of all three read the logits once: they become one kernel.
        codes = [low + jnp.minimum(step, highest - low) for step in steps]
        held = [holds(_float_of(code)).astype(jnp.uint32) for code in codes]
        return low + ((held[0] + held[1] + held[2]) << shift)

    return _float_of(jax.lax.fori_loop(0, 16, refine, low))


def _float_of(codes: Array) -> Array:
    """Returns the float32 of uint32 codes, which have the order of the numbers."""
    # A larger magnitude is a smaller number where the sign is negative.
    is_positive = codes >> 31 == 1
    bits = jnp.where(is_positive, codes & 0x7FFFFFFF, ~codes)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
