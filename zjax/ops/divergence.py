"""Divergences of two distributions over tokens, and the gradients of the logits.

`beta` names the divergence of a student q from a teacher p: `FORWARD` is KL(p || q),
`REVERSE` is KL(q || p), and between them lies the generalised Jensen-Shannon divergence
`beta KL(p || m) + (1 - beta) KL(q || m)` with `m = beta p + (1 - beta) q`.

Reference:
    Agarwal et al., GKD (arXiv:2306.13649, section 2).
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

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
