"""Log-probabilities of chosen tokens, and of sequences, from logits.

Logits stay in the dtype of the model: the softmax is float32, in a loop that stores
nothing of the size of the vocabulary.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from zjax.rl.masks import at_least_float32, masked
from zjax.rl.ranges import check_above_zero


def token_logprobs(
    logits: Float[Array, "*S V"],
    tokens: Int[Array, "*S"],
    mask: Bool[Array, "*S"],
    *,
    temperature: float = 1.0,
) -> Float[Array, "*S"]:
    """Computes `log softmax(logits / temperature)[token]` of each token.

    The backward pass computes the softmax again, from the logits. Masked tokens give
    0, and logits of masked tokens get a gradient of 0, NaN and infinity included.

    Args:
        logits: Logits that predict `tokens`, at the same place, of any float dtype.
        tokens: Ids of the tokens, 0 to V - 1; any integer where `mask` is False.
            Another id is NaN.
        mask: Tokens that count: completions with the end token, without padding.
        temperature: Divisor of the logits as the tokens were sampled, above 0.

    Returns:
        Log-probabilities, 0 or less, in float32; float64 from float64 logits.

    Raises:
        ConfigError: The temperature is not above 0.

    Example:
        >>> logits = jnp.log(jnp.array([[0.25, 0.75], [jnp.nan, 0.0]]))
        >>> tokens, mask = jnp.array([1, -100]), jnp.array([True, False])
        >>> jnp.exp(token_logprobs(logits, tokens, mask)).tolist()
        [0.75, 1.0]
    """
    check_above_zero(temperature=temperature)
    return _token_logprobs(temperature, logits, tokens, mask)


class SequenceLogprobs(NamedTuple):
    """Log-probabilities of S sequences, of which losses take the sum or the mean.

    Args:
        sums: Sums over the tokens that count, float32 or float64.
        num_tokens: Numbers of tokens that count; a sequence without tokens is padding,
            whose sum may be any value and is read as 0.
    """

    sums: Float[Array, " S"]
    num_tokens: Num[Array, " S"]

    @property
    def is_real(self) -> Bool[Array, " S"]:
        """Marks sequences with tokens."""
        return self.num_tokens > 0

    @property
    def totals(self) -> Float[Array, " S"]:
        """Returns the sums, 0 for padding."""
        return jnp.where(self.is_real, self.sums, 0)

    @property
    def means(self) -> Float[Array, " S"]:
        """Returns the means over the tokens, 0 for padding."""
        return self.totals / jnp.maximum(self.num_tokens, 1)


def sequence_logprobs(
    logprobs: Float[Array, "S L"], mask: Bool[Array, "S L"]
) -> SequenceLogprobs:
    """Sums log-probabilities over the tokens of each sequence.

    Args:
        logprobs: Log-probability of each token; any value where `mask` is False.
        mask: Tokens that count.

    Returns:
        Sums in float32, float64 from float64, and numbers of tokens, int32.

    Example:
        >>> logprobs = jnp.array([[-1.0, -2.0, jnp.nan]])
        >>> found = sequence_logprobs(logprobs, jnp.array([[True, True, False]]))
        >>> found.sums.tolist(), found.num_tokens.tolist(), found.means.tolist()
        ([-3.0], [2], [-1.5])
    """
    sums = masked(logprobs, mask).sum(1)
    return SequenceLogprobs(sums, mask.sum(1, dtype=jnp.int32))


def log_partition(
    logits: Float[Array, "*S V"], temperature: float
) -> Float[Array, "*S"]:
    """Computes `log sum_v exp(logits / temperature)`, float32 or wider."""
    # The maximum is taken in the dtype of the logits: two readers of one cast would
    # have XLA store the cast.
    largest = logits.max(-1)
    gaps = at_least_float32(logits) - at_least_float32(largest)[..., None]
    powers = jnp.exp(gaps / temperature).sum(-1)
    return jnp.log(powers) + at_least_float32(largest) / temperature


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_logprobs(temperature, logits, tokens, mask):
    """Computes the log-probabilities, 0 where masked."""
    return _token_logprobs_forward(temperature, logits, tokens, mask)[0]


def _token_logprobs_forward(temperature, logits, tokens, mask):
    """Keeps the logits as given and one number per token for the backward pass."""
    partitions = log_partition(logits, temperature)
    chosen = jnp.where(_is_token(logits, tokens), logits, 0).sum(-1)
    # A compiled program cannot raise: NaN is how a bad id shows.
    is_id = (tokens >= 0) & (tokens < logits.shape[-1])
    found = at_least_float32(chosen) / temperature - partitions
    found = jnp.where(is_id, found, jnp.nan)
    return jnp.where(mask, found, 0), (logits, tokens, mask, partitions)


def _token_logprobs_backward(temperature, residuals, cotangents):
    """Returns the gradient of the logits: the token's one-hot minus the softmax."""
    logits, tokens, mask, partitions = residuals
    scores = at_least_float32(logits) / temperature
    slopes = _is_token(logits, tokens) - jnp.exp(scores - partitions[..., None])
    gradient = (cotangents / temperature)[..., None] * slopes
    gradient = jnp.where(mask[..., None], gradient, 0)
    return gradient.astype(logits.dtype), None, None


_token_logprobs.defvjp(_token_logprobs_forward, _token_logprobs_backward)


def _is_token(logits, tokens):
    """Marks the token's place in the vocabulary."""
    # A comparison fuses, and works on a sharded vocabulary; a gather does neither.
    places = jax.lax.broadcasted_iota(tokens.dtype, logits.shape, logits.ndim - 1)
    return places == tokens[..., None]
