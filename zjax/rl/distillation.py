"""Divergences of a student from a teacher per token, over the whole vocabulary.

On policy, the tokens before each place are sampled by the student, and are not
differentiated. Gradients have a closed form, so that the backward pass reads the logits
and one number per token: no probabilities are stored.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from zjax.errors import ConfigError, Problem
from zjax.ops.divergence import FORWARD, REVERSE, divergence_of, slopes_of
from zjax.rl.logprobs import log_partition
from zjax.rl.masks import at_least_float32
from zjax.rl.ranges import check_above_zero


def reverse_kl(
    student: Float[Array, "*S V"],
    teacher: Float[Array, "*S V"],
    mask: Bool[Array, "*S"],
    *,
    temperature: float = 1.0,
) -> Float[Array, "*S"]:
    """Computes `KL(q || p) = sum_v q_v (log q_v - log p_v)` of each token.

    q is the softmax of the student's logits over `temperature`, p of the teacher's. The
    student avoids what the teacher would not say: the usual loss on the student's
    samples.

    Args:
        student: Logits of the student, of any float dtype.
        teacher: Logits of the teacher at the same places; not differentiated.
        mask: Tokens that count; others give 0, and get no gradient, NaN and infinity
            included.
        temperature: Divisor of both logits, above 0. The loss is not multiplied by the
            square of the temperature.

    Returns:
        Divergences, 0 or more, in float32; float64 from float64 logits. Infinite where
        the student draws a token that the teacher excludes by a logit of -inf.

    Raises:
        ConfigError: The temperature is not above 0.

    Example:
        >>> student = jnp.log(jnp.array([[0.5, 0.5]]))
        >>> teacher = jnp.log(jnp.array([[0.25, 0.75]]))
        >>> f"{reverse_kl(student, teacher, jnp.array([True]))[0]:.4f}"
        '0.1438'

    Reference:
        Gu et al., MiniLLM (arXiv:2306.08543, equation 1), without the return of later
        tokens; Agarwal et al., GKD (arXiv:2306.13649).
    """
    return _checked(REVERSE, student, teacher, mask, temperature)


def forward_kl(
    student: Float[Array, "*S V"],
    teacher: Float[Array, "*S V"],
    mask: Bool[Array, "*S"],
    *,
    temperature: float = 1.0,
) -> Float[Array, "*S"]:
    """Computes `KL(p || q) = sum_v p_v (log p_v - log q_v)` of each token.

    The student covers all that the teacher would say. Arguments, returned values and
    errors are as in `reverse_kl`; infinite where the student excludes a token of the
    teacher.

    Example:
        >>> student = jnp.log(jnp.array([[0.5, 0.5]]))
        >>> teacher = jnp.log(jnp.array([[0.25, 0.75]]))
        >>> f"{forward_kl(student, teacher, jnp.array([True]))[0]:.4f}"
        '0.1308'

    Reference:
        Hinton et al. (arXiv:1503.02531); Agarwal et al., GKD (arXiv:2306.13649).
    """
    return _checked(FORWARD, student, teacher, mask, temperature)


def jensen_shannon(
    student: Float[Array, "*S V"],
    teacher: Float[Array, "*S V"],
    mask: Bool[Array, "*S"],
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
) -> Float[Array, "*S"]:
    """Computes the generalised Jensen-Shannon divergence of each token.

    `beta KL(p || m) + (1 - beta) KL(q || m)`, with the mixture `m = beta p + (1 - beta)
    q`. Bounded, whatever the logits. Over beta it tends to `forward_kl` as beta falls
    to 0; over 1 - beta to `reverse_kl` as beta rises to 1.

    Args:
        student: Logits of the student, of any float dtype.
        teacher: Logits of the teacher at the same places; not differentiated.
        mask: Tokens that count, as in `reverse_kl`.
        beta: Share of the teacher in the mixture, above 0 and below 1.
        temperature: Divisor of both logits, above 0.

    Returns:
        Divergences, 0 to log 2, in float32; float64 from float64 logits.

    Raises:
        ConfigError: `beta` is not between 0 and 1, or the temperature not above 0.

    Example:
        >>> student = jnp.log(jnp.array([[0.5, 0.5]]))
        >>> teacher = jnp.log(jnp.array([[0.25, 0.75]]))
        >>> f"{jensen_shannon(student, teacher, jnp.array([True]))[0]:.4f}"
        '0.0338'

    Reference:
        Agarwal et al., GKD (arXiv:2306.13649, section 2), with the student's samples.
    """
    if not 0 < beta < 1:
        problem = "is not between 0 and 1"
        remedy = "use forward_kl for 0, and reverse_kl for 1"
        raise ConfigError(Problem("beta", beta, problem, remedy))
    return _checked(beta, student, teacher, mask, temperature)


def _checked(beta, student, teacher, mask, temperature):
    """Checks the temperature, and computes the divergence."""
    check_above_zero(temperature=temperature)
    return _divergence((beta, temperature), student, teacher, mask)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _divergence(terms, student, teacher, mask):
    """Computes the divergences, 0 where masked."""
    return _divergence_forward(terms, student, teacher, mask)[0]


def _divergence_forward(terms, student, teacher, mask):
    """Keeps the logits as given and three numbers per token for the backward pass."""
    beta, temperature = terms
    norms = tuple(log_partition(x, temperature) for x in (student, teacher))
    log_q, log_p = _log_softmax(temperature, (student, teacher), norms)
    values = divergence_of(beta, log_p, log_q)
    values = jnp.where(mask, values, 0)
    return values, (student, teacher, mask, norms)


def _divergence_backward(terms, residuals, cotangents):
    """Returns the gradient of the student's logits, from `_slopes`."""
    student, teacher, mask, norms = residuals
    beta, temperature = terms
    log_q, log_p = _log_softmax(temperature, (student, teacher), norms)
    slopes = slopes_of(beta, log_p, log_q)
    gradient = (cotangents / temperature)[..., None] * slopes
    gradient = jnp.where(mask[..., None], gradient, 0)
    return gradient.astype(student.dtype), None, None


_divergence.defvjp(_divergence_forward, _divergence_backward)


def _log_softmax(temperature, logits, norms):
    """Normalises logits by the stored log-sum-exps."""
    return [
        at_least_float32(x) / temperature - norm[..., None]
        for x, norm in zip(logits, norms, strict=True)
    ]
