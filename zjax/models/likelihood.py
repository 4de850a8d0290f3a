"""Log-probabilities of tokens that follow others, by the built-in decoder."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from zjax.models.decoder import Decoder


def log_likelihood(
    model: Decoder,
    tokens: Int[Array, "B L"],
    targets: Int[Array, "B L"],
    counts: Bool[Array, "B L"],
) -> tuple[Float[Array, " B"], Bool[Array, " B"]]:
    """Sums the log-probabilities of targets, and says whether all are most likely.

    Args:
        model: Decoder, with its weights in the dtype to compute in.
        tokens: Token ids; padding is on the right.
        targets: The token that follows each of them.
        counts: Whether a target counts.

    Returns:
        Natural logarithms, float32[B], and whether no other target is likelier.
    """
    graph, state = nnx.split(model)
    return _log_likelihood(state, tokens, targets, counts, graph=graph)


@functools.partial(jax.jit, static_argnames="graph")
def _log_likelihood(state, tokens, targets, counts, *, graph):
    logits = nnx.merge(graph, state)(tokens)
    chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    each = chosen - jax.nn.logsumexp(logits, -1)
    is_best = (logits.argmax(-1) == targets) | ~counts
    return jnp.sum(each * counts, -1), is_best.all(-1)
