"""Transformations of logits [R, V], with settings of each row as arrays [R].

Each function maps logits to logits, so that functions compose in any order. A token
that cannot be drawn has -inf.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int, UInt32

_LOWEST, _HIGHEST = 0x007FFFFF, 0xFF800000
"""Codes of -inf and inf, by `_float_of`."""
_NUM_LIMBS = 3
"""Number of integers of a weight, of 12 bits each in a vocabulary of 2^18 tokens."""


def count_tokens(
    history: Int[Array, "R S"],
    firsts: Int[Array, " R"],
    ends: Int[Array, " R"],
    vocab_size: int,
) -> Int[Array, "R V"]:
    """Counts the tokens in columns `firsts` to `ends` - 1 of each row, by id."""
    columns = jnp.arange(history.shape[1], dtype=jnp.int32)[None]
    is_counted = (columns >= firsts[:, None]) & (columns < ends[:, None])
    rows = jnp.arange(history.shape[0], dtype=jnp.int32)[:, None]
    counts = jnp.zeros((history.shape[0], vocab_size), jnp.int32)
    return counts.at[rows, history].add(is_counted.astype(jnp.int32))


def penalise_repetition(
    logits: Float32[Array, "R V"],
    counts: Int[Array, "R V"],
    penalties: Float32[Array, " R"],
) -> Float32[Array, "R V"]:
    """Divides positive logits of counted tokens by the penalty, multiplies negative.

    Reference: Keskar et al., CTRL (arXiv:1909.05858), section 4.1; negative logits are
    multiplied so that a penalty above 1 always lowers a logit.
    """
    penalties = penalties[:, None]
    lowered = jnp.where(logits > 0, logits / penalties, logits * penalties)
    return jnp.where(counts > 0, lowered, logits)


def penalise_counts(
    logits: Float32[Array, "R V"],
    counts: Int[Array, "R V"],
    presence: Float32[Array, " R"],
    frequency: Float32[Array, " R"],
) -> Float32[Array, "R V"]:
    """Subtracts `presence` from counted tokens, and `frequency` for each occurrence."""
    penalties = presence[:, None] * (counts > 0) + frequency[:, None] * counts
    return logits - penalties


def forbid(
    logits: Float32[Array, "R V"], ids: Int[Array, "R F"]
) -> Float32[Array, "R V"]:
    """Forbids the ids of each row; -1 is no id."""
    # Behind the vocabulary, as -1 would count from its end.
    ids = jnp.where(ids < 0, logits.shape[1], ids)
    rows = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
    return logits.at[rows, ids].set(-jnp.inf, mode="drop")


def scale(
    logits: Float32[Array, "R V"], temperatures: Float32[Array, " R"]
) -> Float32[Array, "R V"]:
    """Divides logits by temperatures above 0, with the largest logit moved to 0."""
    # A low temperature would otherwise round the logits that decide.
    return (logits - _maximum(logits)) / temperatures[:, None]


def keep_top_k(
    logits: Float32[Array, "R V"], top_k: Int[Array, " R"]
) -> Float32[Array, "R V"]:
    """Keeps the `top_k` largest logits and all that equal the least; 0 keeps all."""
    wanted = jnp.where(top_k > 0, top_k, logits.shape[1])

    def has_enough(thresholds):
        return jnp.sum(logits >= thresholds[:, None], axis=1) >= wanted

    return _trim(logits, _largest_threshold(has_enough, logits.shape[0]))


def keep_top_p(
    logits: Float32[Array, "R V"], top_p: Float32[Array, " R"]
) -> Float32[Array, "R V"]:
    """Keeps tokens with less than `top_p` probability in larger logits; 1 keeps all.

    Reference: Holtzman et al., nucleus sampling (arXiv:1904.09751).
    """
    weights = jnp.exp(logits - _maximum(logits))
    # Devices may take a smaller number for 0, which every threshold would satisfy.
    least = jnp.maximum(top_p, jnp.finfo(jnp.float32).tiny)
    wanted = least * _exact_sum(weights)

    def has_enough(thresholds):
        return (
            _exact_sum(jnp.where(logits >= thresholds[:, None], weights, 0)) >= wanted
        )

    thresholds = _largest_threshold(has_enough, logits.shape[0])
    return _trim(logits, jnp.where(top_p < 1, thresholds, -jnp.inf))


def keep_min_p(
    logits: Float32[Array, "R V"], min_p: Float32[Array, " R"]
) -> Float32[Array, "R V"]:
    """Keeps tokens of at least `min_p` times the probability of the likeliest.

    Reference: Nguyen et al. (arXiv:2407.01082).
    """
    is_likely = logits - _maximum(logits) >= jnp.log(min_p)[:, None]
    return jnp.where(is_likely, logits, -jnp.inf)


def _maximum(logits):
    """Returns the largest logit of each row, [R, 1]."""
    return logits.max(axis=1, keepdims=True)


def _trim(logits, thresholds):
    """Keeps logits from the threshold of a row on."""
    return jnp.where(logits >= thresholds[:, None], logits, -jnp.inf)


def _largest_threshold(
    holds: Callable[[jax.Array], jax.Array], num_rows: int
) -> Float32[Array, " R"]:
    """Searches the largest thresholds that satisfy a condition.

    `holds(float32[R]) -> bool[R]` holds up to a threshold of each row, at -inf at
    least, and never at inf. The result is exact: 16 rounds find 2 bits each.
    """
    low, highest = (jnp.full(num_rows, x, jnp.uint32) for x in (_LOWEST, _HIGHEST))

    def refine(number, low):
        shift = jnp.uint32(30) - 2 * jnp.uint32(number)
        steps = [jnp.uint32(step) << shift for step in (1, 2, 3)]
        # The sums of all three read the logits once: they become one kernel.
        codes = [low + jnp.minimum(step, highest - low) for step in steps]
        held = [holds(_float_of(code)).astype(jnp.uint32) for code in codes]
        return low + ((held[0] + held[1] + held[2]) << shift)

    low = jax.lax.fori_loop(0, 16, refine, low)
    return _float_of(low)


def _float_of(codes: UInt32[Array, " R"]) -> Float32[Array, " R"]:
    """Returns the float32 of codes, which have the order of the numbers."""
    # A larger magnitude is a smaller number where the sign is negative.
    is_positive = codes >> 31 == 1
    bits = jnp.where(is_positive, codes & 0x7FFFFFFF, ~codes)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _exact_sum(weights: Float32[Array, "R V"]) -> Float32[Array, " R"]:
    """Sums weights up to 1 of each row, alike in every order of the additions.

    Each weight is cut into integers, as a sum of floats depends on the shape of the
    program and on its devices, and a filter must not.
    """
    num_bits = 31 - weights.shape[1].bit_length()
    total, rest = jnp.zeros(weights.shape[0], jnp.float32), weights
    for number in range(_NUM_LIMBS):
        rest = rest * 2.0**num_bits
        limb = jnp.floor(rest)
        rest = rest - limb
        sums = limb.astype(jnp.int32).sum(axis=1)
        total += sums.astype(jnp.float32) * 2.0 ** (-num_bits * (number + 1))
    return total
