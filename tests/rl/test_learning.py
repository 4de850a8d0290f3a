"""Losses, composed from logits on, train a model: a table of logits by last token."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zjax import rl

VOCAB = 5
TOKENS = jnp.array([[1, 2, 3, 0], [1, 4, 4, 4], [2, 3, 3, 0], [2, 1, 1, 0]])
MASK = jnp.array([[False, True, True, True], [False, True, True, False]] * 2)
"""Prompts of one token; the second completion of each pair is shorter."""


def pairs_of(table):
    """Log-probabilities of adjacent rows, the chosen completion first."""
    logits = table[TOKENS[:, :-1]]
    logprobs = rl.token_logprobs(logits, TOKENS[:, 1:], MASK[:, 1:])
    found = rl.sequence_logprobs(logprobs, MASK[:, 1:])
    return rl.Pairs(*(jax.tree.map(lambda x, k=k: x[k::2], found) for k in (0, 1)))


def train(loss, start, num_steps=30):
    """Minimises a function of the table; returns the table, and the first loss."""
    optimizer = optax.adam(0.1)

    @jax.jit
    def step(table, state):
        value, gradient = jax.value_and_grad(loss)(table)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(table, updates), state, value

    table, state, first = step(start, optimizer.init(start))
    for _ in range(num_steps - 1):
        table, state, _ = step(table, state)
    return table, first


@pytest.mark.parametrize(
    "loss", [rl.dpo_loss, rl.robust_dpo_loss, rl.hinge_loss, rl.ipo_loss]
)
def test_preferences_are_learned(loss):
    start = jnp.zeros((VOCAB, VOCAB))
    reference = pairs_of(start)

    def value(table):
        policy = pairs_of(table)
        return rl.example_mean(loss(policy, reference), policy.is_real).mean

    table, first = train(value, start)
    found = pairs_of(table)
    gained = rl.log_ratios(found.chosen, reference.chosen)
    lost = rl.log_ratios(found.rejected, reference.rejected)
    assert value(table) < first
    assert (gained - lost).min() > 1


@pytest.mark.parametrize(
    "divergence", [rl.reverse_kl, rl.forward_kl, rl.jensen_shannon]
)
def test_students_become_teachers(divergence):
    rng = np.random.default_rng(0)
    teacher = jnp.asarray(rng.normal(size=(VOCAB, VOCAB)), jnp.float32)
    inputs, mask = TOKENS[:, :-1], MASK[:, 1:]

    def value(table):
        losses = divergence(table[inputs], teacher[inputs], mask)
        return rl.token_mean(losses, mask).mean

    table, first = train(value, jnp.zeros((VOCAB, VOCAB)), num_steps=60)
    assert value(table) < 0.02 * first
