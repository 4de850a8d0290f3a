import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.rl import GOLDEN, MASK, NEW, OLD, REF, assert_gradient, spoiled
from zjax import rl

ESTIMATES = {"k1": rl.kl_k1, "k2": rl.kl_k2, "k3": rl.kl_k3, "k3_k2": rl.kl_k3_k2}
each = pytest.mark.parametrize("estimate", ESTIMATES.values(), ids=ESTIMATES)


def total(estimate, x, ref=REF):
    return estimate(x, jnp.asarray(ref), jnp.asarray(MASK)).sum()


@pytest.mark.parametrize("name", ESTIMATES)
def test_values_are_golden(name):
    with jax.enable_x64(True):
        found = total(ESTIMATES[name], jnp.asarray(NEW))
    expected = GOLDEN["kl_token_sums"][name.split("_")[0]]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_gradients_are_golden(name):
    """Of the clip loss with 0.04 times the estimate, as a mean over tokens."""

    def loss(x):
        mask, advantages = jnp.asarray(MASK), GOLDEN["advantages"]
        advantages = jnp.asarray(advantages["grpo_trl_eps1e-4_ddof1"])[:, None]
        ratios = rl.token_ratios(x, jnp.asarray(OLD), mask)
        losses = rl.clip_loss(ratios, advantages, mask, low=0.2, high=0.28)
        losses += 0.04 * ESTIMATES[name](x, jnp.asarray(REF), mask)
        return rl.token_mean(losses, mask).mean

    with jax.enable_x64(True):
        found = jax.jit(jax.grad(loss))(jnp.asarray(NEW))
    expected = GOLDEN["gradients_token_mean"][f"clip_{name}"]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_gradients_equal_finite_differences(name):
    assert_gradient(lambda x: total(ESTIMATES[name], x), NEW)


def test_k3_k2_has_the_gradient_of_k2():
    expected = assert_gradient(lambda x: total(rl.kl_k2, x), NEW)
    with jax.enable_x64(True):
        found = jax.grad(lambda x: total(rl.kl_k3_k2, x))(jnp.asarray(NEW))
    np.testing.assert_array_equal(found, expected)


def test_gradients_are_of_the_divergences_that_the_pages_name():
    """Over all tokens of a small vocabulary, weighted by the policy."""
    logits = jnp.array([0.3, -0.5, 1.1, 0.0])
    ref = jax.nn.log_softmax(jnp.array([1.0, 0.2, -0.3, 0.5]))
    mask = jnp.ones((1, 4), bool)

    def mean_gradient(estimate):
        sampled = jax.nn.softmax(logits)  # tokens of the policy, not differentiated

        def mean(logits):
            logprobs = jax.nn.log_softmax(logits)
            return (sampled * estimate(logprobs[None], ref[None], mask)[0]).sum()

        return jax.jit(jax.grad(mean))(logits)

    @jax.jit
    @jax.grad
    def reverse(logits):
        logprobs = jax.nn.log_softmax(logits)
        return (jnp.exp(logprobs) * (logprobs - ref)).sum()

    @jax.jit
    @jax.grad
    def forward(logits):
        return (jnp.exp(ref) * (ref - jax.nn.log_softmax(logits))).sum()

    close = {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(mean_gradient(rl.kl_k1), np.zeros(4), **close)
    for estimate in (rl.kl_k2, rl.kl_k3_k2):
        found = mean_gradient(estimate)
        np.testing.assert_allclose(found, reverse(logits), **close)
    found = mean_gradient(rl.kl_k3)
    np.testing.assert_allclose(found, forward(logits), **close)
    assert np.abs(forward(logits) - reverse(logits)).max() > 0.01


@each
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_trap_5_values_outside_the_mask_reach_nothing(estimate, value):
    bad = jnp.asarray(spoiled(NEW, value)), spoiled(REF, value)
    found, gradient = jax.value_and_grad(lambda x: total(estimate, x, bad[1]))(bad[0])
    assert found == total(estimate, jnp.asarray(NEW))
    assert np.isfinite(gradient).all()
    assert not np.asarray(gradient)[~MASK].any()


@each
def test_the_reference_is_not_differentiated(estimate):
    def of_reference(ref):
        return estimate(jnp.asarray(NEW), ref, jnp.asarray(MASK)).sum()

    assert not jax.grad(of_reference)(jnp.asarray(REF)).any()


def test_k3_of_near_policies_keeps_its_digits():
    """Fails if `exp(d) - 1` cancels: the estimate would be 0 or below."""
    logprobs, mask = jnp.full((1, 3), -1.0), jnp.ones((1, 3), bool)
    gaps = jnp.array([[1e-3, -1e-3, 3e-3]])
    found = rl.kl_k3(logprobs, logprobs + gaps, mask)
    np.testing.assert_allclose(found, gaps**2 / 2, rtol=0.05)


@each
@pytest.mark.parametrize("gap", [-1e4, 1e4])
def test_policies_far_apart_have_finite_gradients(estimate, gap):
    x = jnp.asarray(NEW)
    found = jax.value_and_grad(lambda y: total(estimate, y, x + gap))(x)
    assert all(np.isfinite(y).all() for y in found)
