"""Samples the next token from logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def sample_tokens(
    logits: Float[Array, "B V"],
    key: jax.Array,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Int[Array, " B"]:
    """Chooses one token per row.

    Args:
        logits: Logits of the next token.
        key: Random key; row b draws with `fold_in(key, b)`. Unused at temperature 0.
        temperature: Divisor of the logits; 0 takes the most likely token.
        top_k: Number of most likely tokens to draw from; 0 is all.
        top_p: Probability mass of the most likely tokens to draw from, above 0 to 1.

    Example:
        >>> sample_tokens(jnp.array([[0.0, 2.0, 1.0]]), jax.random.key(0),
        ...               temperature=0.0).tolist()
        [1]

    Reference:
        top-p: Holtzman et al. (arXiv:1904.09751).
    """
    if temperature == 0.0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    scores = logits.astype(jnp.float32) / temperature
    if top_k > 0:
        scores = _trim(scores, jax.lax.top_k(scores, top_k)[0][:, -1:])
    if top_p < 1.0:
        ranked = jnp.flip(jnp.sort(scores, axis=-1), axis=-1)
        likelihoods = jax.nn.softmax(ranked, axis=-1)
        mass_above = jnp.cumsum(likelihoods, axis=-1) - likelihoods
        candidates = jnp.where(mass_above < top_p, ranked, jnp.inf)
        scores = _trim(scores, candidates.min(axis=-1, keepdims=True))
    rows = jnp.arange(scores.shape[0])
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)
    return jax.vmap(jax.random.categorical)(keys, scores).astype(jnp.int32)


def _trim(scores, minimum):
    return jnp.where(scores >= minimum, scores, -jnp.inf)
