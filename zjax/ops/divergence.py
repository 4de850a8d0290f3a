"""Divergences of two distributions over tokens, and the gradients of the logits.

`beta` names the divergence of a student q from a teacher p: `FORWARD` is KL(p || q),
`REVERSE` is KL(q || p), and between them lies the generalised Jensen-Shannon divergence
`beta KL(p || m) + (1 - beta) KL(q || m)` with `m = beta p + (1 - beta) q`.

A teacher of which only the k most likely tokens are known has k + 1 outcomes: the k
tokens, and all other tokens as one. The student's probabilities are added up alike. The
divergence of the outcomes is at most the divergence of all tokens, and equal for k = V.

Reference:
    Agarwal et al., GKD (arXiv:2306.13649, section 2).
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

FORWARD, REVERSE = 0.0, 1.0
"""Ends of the range of `beta`, each over the factor by which the divergence vanishes.
"""


def divergence_of(
    beta: float, log_p: Float[Array, "*S V"], log_q: Float[Array, "*S V"]
) -> Float[Array, "*S"]:
    """Computes the divergence of log-probabilities of teacher and student.

    Example:
        >>> p, q = jnp.log(jnp.array([0.25, 0.75])), jnp.log(jnp.array([0.5, 0.5]))
        >>> [f"{divergence_of(beta, p, q):.4f}" for beta in (FORWARD, 0.5, REVERSE)]
        ['0.1308', '0.0338', '0.1438']
    """
    if beta == FORWARD:
        return _expectation(log_p, log_p - log_q)
    if beta == REVERSE:
        return _expectation(log_q, log_q - log_p)
    log_m = _log_mixture(beta, log_p, log_q)
    values = beta * _expectation(log_p, log_p - log_m)
    return values + (1 - beta) * _expectation(log_q, log_q - log_m)


def slopes_of(
    beta: float, log_p: Float[Array, "*S V"], log_q: Float[Array, "*S V"]
) -> Float[Array, "*S V"]:
    """Returns the gradient of the divergence by the logits whose softmax is q."""
    if beta == FORWARD:
        return jnp.exp(log_q) - jnp.exp(log_p)
    # The slope by log q, whose mean under q the softmax takes away.
    log_m = log_p if beta == REVERSE else _log_mixture(beta, log_p, log_q)
    ratios = _finite_product(log_q, log_q - log_m)
    slopes = ratios - jnp.exp(log_q) * ratios.sum(-1, keepdims=True)
    return slopes if beta == REVERSE else (1 - beta) * slopes


def outcomes_of(
    log_q: Float[Array, "*S V"], ids: Int[Array, "*S K"]
) -> Float[Array, "*S K1"]:
    """Returns log-probabilities of the tokens `ids`, then of all other tokens together.

    Example:
        >>> log_q = jnp.log(jnp.array([0.125, 0.5, 0.125, 0.25]))
        >>> jnp.exp(outcomes_of(log_q, jnp.array([1, 3]))).tolist()
        [0.5, 0.25, 0.25]
    """
    # The sum of the others, not 1 minus the sum of the known: digits would cancel.
    others = jax.nn.logsumexp(_put(log_q, ids, -jnp.inf), axis=-1, keepdims=True)
    return jnp.concatenate([jnp.take_along_axis(log_q, ids, -1), others], -1)


def outcome_divergence(
    beta: float,
    log_p: Float[Array, "*S K1"],
    log_q: Float[Array, "*S V"],
    ids: Int[Array, "*S K"],
) -> tuple[Float[Array, "*S"], Float[Array, "*S V"]]:
    """Computes the divergence of outcomes, and the gradient by the student's logits.

    `log_p` are the teacher's outcomes, in the order of `outcomes_of`.

    Example:
        >>> p, q = (jnp.log(jnp.array(x)) for x in ([0.5, 0.5], [0.25, 0.5, 0.25]))
        >>> value, slopes = outcome_divergence(FORWARD, p, q, jnp.array([0]))
        >>> [f"{x:.4f}" for x in (value, *slopes)]
        ['0.1438', '-0.2500', '0.1667', '0.0833']
    """
    outcomes = outcomes_of(log_q, ids)
    slopes = slopes_of(beta, log_p, outcomes)
    # A logit of the others moves their sum by the token's share.
    others = slopes[..., -1:] * jnp.exp(log_q - outcomes[..., -1:])
    return divergence_of(beta, log_p, outcomes), _put(others, ids, slopes[..., :-1])


def _put(x, ids, values):
    """Replaces the entries `ids` of the last dim."""
    put = jnp.vectorize(lambda x, i, v: x.at[i].set(v), signature="(v),(k),(k)->(v)")
    return put(x, ids, jnp.broadcast_to(values, ids.shape))


def _log_mixture(beta, log_p, log_q):
    """Returns `log(beta p + (1 - beta) q)`."""
    return jnp.logaddexp(math.log(beta) + log_p, math.log1p(-beta) + log_q)


def _expectation(log_weights, values):
    """Sums `values` by weights; a weight of 0 leaves out an infinite value."""
    return _finite_product(log_weights, values).sum(-1)


def _finite_product(log_weights, values):
    """Multiplies by weights, with `0 * inf = 0`."""
    weights = jnp.exp(log_weights)
    return jnp.where(weights > 0, weights * values, 0)
