"""Experts that choose their tokens, against loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.reference import moe as reference
from tests.support.experts import outcomes
from zjax.moe.experts import Experts
from zjax.moe.router import Router, route

T, M, F = 24, 6, 4


def make_logits(num_experts):
    logits = np.random.default_rng(0).normal(size=(T, num_experts))
    logits[1] = logits[0]  # equal scores
    return logits.astype(np.float32)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("factor", "capacity"), [(0.5, 3), (2.0, 12), (9.0, T)])
def test_each_expert_takes_its_best_tokens(scores, factor, capacity):
    router = Router(
        num_experts=4,
        choice="experts",
        top_k=3,  # not read
        scores=scores,
        scale=2.0,
        capacity_factor=factor,
        min_capacity=1,
    )
    logits = make_logits(4)
    found = route(jnp.asarray(logits), router, key=jax.random.key(0))
    expected = reference.choose_tokens(
        np.float64(logits), capacity, scores == "sigmoid"
    )
    assert found.num_kept.tolist() == [capacity] * 4
    np.testing.assert_array_equal(found.kept, expected > 0)
    np.testing.assert_allclose(found.weights, 2 * expected, rtol=1e-6)


def test_padding_is_taken_by_no_expert():
    counts = jnp.arange(T) >= T - 5
    router = Router(num_experts=4, choice="experts", eval_capacity_factor=2.0)
    logits = jnp.asarray(make_logits(4))
    found = route(logits, router, counts=counts)
    np.testing.assert_array_equal(found.kept, jnp.broadcast_to(counts[:, None], (T, 4)))


@pytest.mark.parametrize("num_experts", [5, 40])
def test_outputs_and_gradients_are_those_of_single_tokens(num_experts):
    """Tokens have none to many experts. Fails if rows above a number are left out."""
    router = Router(
        num_experts=num_experts,
        choice="experts",
        scores="sigmoid",
        eval_capacity_factor=num_experts / 4,
        min_capacity=1,
    )
    shapes = (num_experts, M, 2 * F), (num_experts, F, M)
    keys = jax.random.split(jax.random.key(0), 2)
    experts = Experts(*map(jax.random.normal, keys, shapes))
    x, cotangent = jax.random.normal(jax.random.key(1), (2, T, M))
    logits = jnp.asarray(make_logits(num_experts)).at[:3].add(4.0).at[3].add(-9.0)

    def by_token(x, experts, routing):
        weights = jnp.where(routing.kept, routing.scores, 0)
        hidden = jnp.einsum("tm,emf->tef", x, experts.up)
        activated = jax.nn.silu(hidden[..., :F]) * hidden[..., F:]
        outputs = jnp.einsum("tef,efm->tem", activated, experts.down)
        return (weights[..., None] * outputs).sum(1)

    found, expected = outcomes(by_token, x, cotangent, experts, logits, router)
    for own, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-4)
    taken = route(logits, router).kept.sum(1)
    assert int(taken.min()) == 0 and int(taken.max()) == num_experts
