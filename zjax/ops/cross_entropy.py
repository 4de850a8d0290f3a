"""Token loss from hidden states, computed in chunks to bound the logits in memory.

Each chunk computes logits, loss and the gradient of the logits in the forward pass:
three products with the head per chunk, as without chunks, instead of the four of
recomputation.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from zjax.ops import invariant as ordered
from zjax.ops.activation import soft_cap
from zjax.ops.divergence import (
    FORWARD,
    divergence_of,
    outcome_divergence,
    slopes_of,
)
from zjax.ops.token_chunks import (
    FROM_LOGITS,
    float32_einsum,
    logits_of,
    over_chunks,
    split_chunks,
)
from zjax.typing import IGNORED


class TokenLoss(NamedTuple):
    """Weighted sums over tokens, in float32."""

    loss_sum: Float[Array, ""]
    """Cross-entropy, plus the z-loss where there is one."""
    weight_sum: Float[Array, ""]
    correct_sum: Float[Array, ""]
    """Weight of the tokens whose target has the largest logit (the first of equal
    logits); not differentiated."""
    divergence_sum: Float[Array, ""] | None = None
    """Divergence from the teacher, times the square of the temperature; None without a
    teacher. `loss_sum` includes it by `Teacher.weight`; not differentiated by
    itself."""


class Teacher(NamedTuple):
    """Teacher logits that a model is to approach, as a product; not differentiated.

    Reference: Hinton et al., arXiv:1503.02531.
    """

    hidden: Float[Array, "B L N"]
    head: Float[Array, "V N"]
    weight: Float[Array, ""]
    """Weight of the divergence beside the cross-entropy."""
    temperature: Float[Array, ""]
    """Divisor of the logits of model and teacher before the softmax."""

    @property
    def by_token(self) -> Any:
        """Arrays [B, L, ...] with an entry for each token."""
        return self.hidden

    def with_tokens(self, change: Callable[[Any], Any]) -> "Teacher":
        """Changes the arrays that have an entry for each token."""
        return self._replace(hidden=change(self.hidden))

    def divergence(
        self, beta: float, hidden: Float[Array, "*S N"], log_q: Float[Array, "*S V"]
    ) -> tuple[Float[Array, "*S"], Float[Array, "*S V"]]:
        """Computes the divergence of some tokens, and the gradient of the logits."""
        target = float32_einsum("prcm,vm->prcv", hidden, self.head)
        log_p = jax.nn.log_softmax(target / self.temperature)
        return divergence_of(beta, log_p, log_q), slopes_of(beta, log_p, log_q)


class StoredTeacher(NamedTuple):
    """Outcomes of a teacher that a model is to approach; not differentiated.

    See `zjax.ops.divergence` for the outcomes.
    """

    ids: Int[Array, "B L K"]
    """Most likely tokens."""
    logprobs: Float[Array, "B L K1"]
    """Log-probability of each of `ids`, then of all other tokens together."""
    weight: Float[Array, ""]
    """Weight of the divergence beside the cross-entropy."""
    temperature: Float[Array, ""]
    """Divisor of the model's logits, by which the teacher's were divided, too."""

    @property
    def by_token(self) -> Any:
        """Arrays [B, L, ...] with an entry for each token."""
        return self.ids, self.logprobs

    def with_tokens(self, change: Callable[[Any], Any]) -> "StoredTeacher":
        """Changes the arrays that have an entry for each token."""
        return self._replace(ids=change(self.ids), logprobs=change(self.logprobs))

    def divergence(
        self, beta: float, tokens: Any, log_q: Float[Array, "*S V"]
    ) -> tuple[Float[Array, "*S"], Float[Array, "*S V"]]:
        """Computes the divergence of some tokens, and the gradient of the logits."""
        ids, log_p = tokens
        return outcome_divergence(beta, log_p, log_q, ids)


def token_loss(
    hidden: Float[Array, "B L M"],
    head: Float[Array, "V M"],
    targets: Int[Array, "B L"],
    weights: Float[Array, "B L"],
    *,
    bias: Float[Array, " V"] | None = None,
    teacher: Teacher | StoredTeacher | None = None,
    divergence: float = FORWARD,
    cap: float = 0.0,
    z_loss: float = 0.0,
    chunk_tokens: int = 0,
    num_batch_shards: int = 1,
    num_length_shards: int = 1,
    invariant: bool = False,
) -> TokenLoss:
    """Sums the cross-entropy of integer targets over tokens.

    Logits are computed from operands in the dtype of `hidden` and accumulated in
    float32; all later values are float32. Forward-mode differentiation is not defined.

    `targets` of -100 are ignored. Another invalid target of nonzero weight makes loss
    and weight NaN. `weights` are not differentiated. `cap` bounds the logits by tanh,
    and needs `teacher=None`. At most `chunk_tokens` tokens per shard have logits at one
    time; 0 means all tokens. The numbers of shards divide B and L. With `invariant`,
    the loss of a token is the same bits beside any tokens. `divergence` is a
    `beta` of `zjax.ops.divergence`.

    Reference:
        z-loss: Chowdhery et al., PaLM (arXiv:2204.02311, section 5).
    """
    weights = _checked_weights(targets, weights, head.shape[0])
    num_shards = num_batch_shards, num_length_shards
    split = functools.partial(
        split_chunks, num_shards=num_shards, chunk_tokens=chunk_tokens
    )
    chunks = split(hidden), split(targets), split(weights)
    if teacher is not None:
        teacher = teacher.with_tokens(split)
    terms = _Terms(z_loss, cap, invariant, divergence)
    loss_sum, correct_sum, divergence_sum = _summed_loss(
        terms, chunks[0], head, bias, *chunks[1:], teacher
    )
    weight_sum = jnp.sum(weights, dtype=jnp.float32)
    return TokenLoss(loss_sum, weight_sum, correct_sum, divergence_sum)


class _Terms(NamedTuple):
    """Static terms of the loss."""

    z_loss: float
    soft_cap: float
    invariant: bool
    divergence: float


def _checked_weights(targets, weights, num_ids):
    """Zeroes weights of ignored targets, and makes weights of invalid targets NaN."""
    weights = jnp.where(targets == IGNORED, 0, weights)
    is_id = (targets >= 0) & (targets < num_ids)
    # A compiled program cannot raise: NaN is how a bad target shows.
    return jnp.where(is_id | (weights == 0), weights, jnp.nan)


def _sum_loss(terms, hidden, head, bias, targets, weights, teacher):
    """Sums loss, correct predictions and divergence over all chunks."""

    def add_chunk(sums, chunk):
        sums_of_chunk, _ = _chunk_loss(terms, head, bias, teacher, *chunk)
        return jax.tree.map(jnp.add, sums, sums_of_chunk), None

    # One sum per shard, so that devices exchange sums once, not per chunk.
    zero = jnp.zeros(hidden.shape[1], jnp.float32)
    sums = zero, zero, None if teacher is None else zero
    chunks = _chunks(hidden, targets, weights, teacher)
    return jax.tree.map(jnp.sum, over_chunks(add_chunk, sums, chunks)[0])


def _summed_loss_forward(terms, hidden, head, bias, targets, weights, teacher):
    """Sums as `_sum_loss`, and computes the gradients that the backward pass scales."""
    num_shards = hidden.shape[1]

    def add_chunk(sums, chunk):
        found, dlogits = _chunk_loss(terms, head, bias, teacher, *chunk)
        dhidden = jnp.einsum("prcv,vm->prcm", dlogits, head)
        # By shard p, so that devices add up once, in the backward pass, not per chunk.
        dhead = float32_einsum("prcv,prcm->pvm", dlogits, chunk[0])
        dbias = None if bias is None else dlogits.sum((1, 2), dtype=jnp.float32)
        return jax.tree.map(jnp.add, sums, (*found, dhead, dbias)), dhidden

    def zeros(*shape):
        return jnp.zeros(shape, jnp.float32)

    sums = (
        zeros(num_shards),
        zeros(num_shards),
        None if teacher is None else zeros(num_shards),
        zeros(num_shards, *head.shape),
        None if bias is None else zeros(num_shards, *bias.shape),
    )
    chunks = _chunks(hidden, targets, weights, teacher)
    (*sums, dhead, dbias), dhidden = over_chunks(add_chunk, sums, chunks)
    # Named for `ops.remat`, whose policies all save them: else the loss runs twice.
    gradients = checkpoint_name((dhidden, dhead, dbias), FROM_LOGITS)
    return tuple(jax.tree.map(jnp.sum, sums)), (*gradients, head, bias)


def _summed_loss_backward(terms, residuals, cotangents):
    """Scales the gradients of the forward pass by the cotangent of the loss sum."""
    dhidden, dhead, dbias, head, bias = residuals
    scale = cotangents[0]  # the other sums are not differentiated

    def scaled(gradient, dtype):
        return (gradient.astype(jnp.float32) * scale).astype(dtype)

    return (
        scaled(dhidden, dhidden.dtype),
        scaled(dhead.sum(0), head.dtype),
        None if bias is None else scaled(dbias.sum(0), bias.dtype),
        None,
        None,
        None,
    )


_summed_loss = jax.custom_vjp(_sum_loss, nondiff_argnums=(0,))
_summed_loss.defvjp(_summed_loss_forward, _summed_loss_backward)


def _chunks(hidden, targets, weights, teacher):
    """Arrays with chunks along the first dim, in the order of `_chunk_loss`."""
    return hidden, targets, weights, None if teacher is None else teacher.by_token


def _chunk_loss(terms, head, bias, teacher, hidden, targets, weights, taught):
    """Sums of one chunk per shard, and the gradient of the logits."""
    logits = logits_of(hidden, head, invariant=terms.invariant)
    if bias is not None:
        logits += bias.astype(jnp.float32)[None, None, None, :]
    cap = ordered.soft_cap if terms.invariant else soft_cap
    logits = cap(logits, terms.soft_cap)
    # A comparison fuses, and works on a sharded vocabulary; a gather does neither.
    vocabulary = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 3)
    is_target = vocabulary == targets[..., None]
    # Subtracted for range: exp(logits) may overflow.
    largest = logits.max(-1)
    # The exponentials are recomputed below instead of stored.
    if terms.invariant:
        log_partition = ordered.log_partition(logits)
    else:
        partition = jnp.exp(logits - largest[..., None]).sum(-1)
        log_partition = jnp.log(partition) + largest
    target_logit = jnp.where(is_target, logits, 0.0).sum(-1)
    losses = log_partition - target_logit + terms.z_loss * jnp.square(log_partition)
    slope = 1.0 + 2.0 * terms.z_loss * log_partition
    probabilities = jnp.exp(logits - log_partition[..., None])
    dlogits = (slope[..., None] * probabilities - is_target) * weights[..., None]
    # The first of equal logits, as argmax: constant logits are not always right.
    first = jnp.where(logits == largest[..., None], vocabulary, head.shape[0]).min(-1)
    hits = first == targets
    loss_sum = jnp.sum(losses * weights, (1, 2))
    correct_sum = jnp.sum(hits * weights, (1, 2))
    if teacher is None:
        if terms.soft_cap:
            # The derivative of tanh, from the capped logits.
            dlogits *= 1.0 - jnp.square(logits / terms.soft_cap)
        return (loss_sum, correct_sum, None), dlogits.astype(hidden.dtype)
    log_q = jax.nn.log_softmax(logits / teacher.temperature)
    divergences, slopes = teacher.divergence(terms.divergence, taught, log_q)
    divergences *= jnp.square(teacher.temperature)
    # The chain rule divides by the temperature; its square is the factor of the sum.
    slopes *= teacher.temperature
    divergence_sum = jnp.sum(divergences * weights, (1, 2))
    loss_sum += teacher.weight * divergence_sum
    dlogits += teacher.weight * slopes * weights[..., None]
    return (loss_sum, correct_sum, divergence_sum), dlogits.astype(hidden.dtype)
