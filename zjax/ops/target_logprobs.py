"""Log-probability of each target and entropy, from hidden states, in chunks of tokens.

The backward pass computes the logits of a chunk again: a gradient of the vocabulary
waits for the losses of whole sequences, so it cannot be known in the forward pass.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from zjax.ops import invariant as ordered
from zjax.ops.activation import soft_cap
from zjax.ops.token_chunks import (
    FROM_LOGITS,
    float32_einsum,
    join_chunks,
    logits_of,
    over_chunks,
    split_chunks,
)
from zjax.typing import IGNORED


class TargetLogprobs(NamedTuple):
    """Values of each token in float32; 0 where the target is -100."""

    logprobs: Float[Array, "B L"]
    """Log-probability of the target, natural logarithm, 0 or less."""
    entropies: Float[Array, "B L"]
    """Entropy of the distribution of the target, in nats."""


def target_logprobs(
    hidden: Float[Array, "B L M"],
    head: Float[Array, "V M"],
    targets: Int[Array, "B L"],
    *,
    temperature: float = 1.0,
    cap: float = 0.0,
    chunk_tokens: int = 0,
    num_batch_shards: int = 1,
    num_length_shards: int = 1,
    invariant: bool = False,
) -> TargetLogprobs:
    """Computes `log softmax(logits / temperature)[target]` and the entropy of a token.

    Logits are the product of `hidden` and `head`, accumulated in float32; all later
    values are float32. Forward-mode differentiation is not defined.

    `targets` of -100 are ignored, and another invalid target gives NaN. The temperature
    is above 0. `cap` bounds the logits by tanh. At most `chunk_tokens` tokens per shard
    have logits at one time; 0 means all tokens. The numbers of shards divide B and L.
    With `invariant`, log-probabilities are the same bits beside any tokens, and those
    of a sampler that filters nothing.

    Example:
        >>> hidden, head = jnp.zeros((1, 2, 4)), jnp.ones((8, 4))
        >>> found = target_logprobs(hidden, head, jnp.array([[3, -100]]))
        >>> jnp.exp(found.logprobs).tolist(), jnp.exp(found.entropies).round(3).tolist()
        ([[0.125, 1.0]], [[8.0, 1.0]])
    """
    num_shards = num_batch_shards, num_length_shards
    split = functools.partial(
        split_chunks, num_shards=num_shards, chunk_tokens=chunk_tokens
    )
    scale = _Scale(temperature, cap, invariant)
    chunks: Any = _target_logprobs(scale, split(hidden), head, split(targets))
    num_rows, length = targets.shape
    join = functools.partial(
        join_chunks, shape=(num_rows, length), num_shards=num_shards
    )
    found = TargetLogprobs(*map(join, chunks))
    is_ignored = targets == IGNORED
    is_id = (targets >= 0) & (targets < head.shape[0])
    # A compiled program cannot raise: NaN is how a bad target shows.
    found = jax.tree.map(lambda x: jnp.where(is_id, x, jnp.nan), found)
    return jax.tree.map(lambda x: jnp.where(is_ignored, 0, x), found)


class _Scale(NamedTuple):
    """Static numbers that scale logits."""

    temperature: float
    soft_cap: float
    invariant: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _target_logprobs(scale, hidden, head, targets):
    """Computes log-probabilities and entropies of all chunks."""
    return _forward(scale, hidden, head, targets)[0]


def _forward(scale, hidden, head, targets):
    """Keeps two numbers per token for the backward pass."""

    def add_chunk(nothing, chunk):
        return nothing, _chunk_logprobs(scale, head, *chunk)

    _, found = over_chunks(add_chunk, (), (hidden, targets))
    logprobs, entropies, partitions = checkpoint_name(found, FROM_LOGITS)
    residuals = hidden, head, targets, entropies, partitions
    return (logprobs, entropies), residuals


def _backward(scale, residuals, cotangents):
    """Computes logits again, chunk by chunk, and the gradients of both factors."""
    hidden, head, targets, entropies, partitions = residuals

    def add_chunk(dhead, chunk):
        dlogits = _chunk_gradient(scale, head, *chunk)
        dhidden = jnp.einsum("prcv,vm->prcm", dlogits, head)
        # By shard p, so that devices add up once, not per chunk.
        return dhead + float32_einsum("prcv,prcm->pvm", dlogits, chunk[0]), dhidden

    zeros = jnp.zeros((hidden.shape[1], *head.shape), jnp.float32)
    chunks = hidden, targets, entropies, partitions, *cotangents
    dhead, dhidden = over_chunks(add_chunk, zeros, chunks)
    return dhidden, dhead.sum(0).astype(head.dtype), None


_target_logprobs.defvjp(_forward, _backward)


def _scores(scale, head, hidden):
    """Returns logits divided by the temperature, and the slope of the cap."""
    logits = soft_cap(float32_einsum("prcm,vm->prcv", hidden, head), scale.soft_cap)
    # The derivative of tanh, from the capped logits.
    slope = 1 - jnp.square(logits / scale.soft_cap) if scale.soft_cap else 1.0
    return logits / scale.temperature, slope / scale.temperature


def _chunk_logprobs(scale, head, hidden, targets):
    """Log-probabilities, entropies and logarithms of the partition of one chunk."""
    if scale.invariant:
        scores, shift = _shifted_scores(scale, head, hidden)
    else:
        (scores, _), shift = _scores(scale, head, hidden), 0.0
    # Subtracted for range: exp(scores) may overflow.
    largest = scores.max(-1)
    gaps = scores - largest[..., None]
    powers = jnp.exp(gaps)
    partition = powers.sum(-1)
    # Of gaps, not of scores, whose common part would cancel digits.
    entropies = jnp.log(partition) - (powers * gaps).sum(-1) / partition
    chosen = jnp.where(_is_target(scores, targets), scores, 0).sum(-1)
    partitions = jnp.log(partition) + largest
    if scale.invariant:
        partitions = ordered.log_partition(scores)
    return chosen - partitions, entropies, partitions + shift


def _shifted_scores(scale, head, hidden):
    """Returns scores as a sampler has them, the largest 0, and the largest before."""
    logits = logits_of(hidden, head, invariant=True)
    logits = ordered.soft_cap(logits, scale.soft_cap)
    largest = logits.max(-1, keepdims=True)
    # A divisor that the compiler knows would become a factor, of other bits.
    divisor = scale.temperature + ordered.product(largest, 0.0)
    return (logits - largest) / divisor, (largest / divisor)[..., 0]


def _chunk_gradient(scale, head, hidden, targets, entropies, partitions, *cotangents):
    """Gradient of the logits, from cotangents of log-probabilities and entropies."""
    by_logprob, by_entropy = (x[..., None] for x in cotangents)
    scores, slope = _scores(scale, head, hidden)
    logprobs = scores - partitions[..., None]
    probabilities = jnp.exp(logprobs)
    gradient = by_logprob * (_is_target(scores, targets) - probabilities)
    gradient -= by_entropy * probabilities * (logprobs + entropies[..., None])
    return (gradient * slope).astype(hidden.dtype)


def _is_target(scores, targets):
    """Marks the target's place in the vocabulary."""
    # A comparison fuses, and works on a sharded vocabulary; a gather does neither.
    places = jax.lax.broadcasted_iota(targets.dtype, scores.shape, 3)
    return places == targets[..., None]
