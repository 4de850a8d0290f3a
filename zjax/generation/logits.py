"""Transformations of logits [R, V], with settings of each row as arrays [R].

Each function maps logits to logits, so that functions compose in any order. A token
that cannot be drawn has -inf.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

from zjax_kernels import top_k_threshold, top_p_threshold


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
    return _trim(logits, top_k_threshold(logits, wanted))


def keep_top_p(
    logits: Float32[Array, "R V"], top_p: Float32[Array, " R"]
) -> Float32[Array, "R V"]:
    """Keeps tokens with less than `top_p` probability in larger logits; 1 keeps all.

    Reference: Holtzman et al., nucleus sampling (arXiv:1904.09751).
    """
    weights = jnp.exp(logits - _maximum(logits))
    thresholds = top_p_threshold(logits, weights, top_p)
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
