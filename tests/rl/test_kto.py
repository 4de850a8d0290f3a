import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.refusals import config_error
from tests.support.rl import MASK, NEW, OLD, REF, assert_gradient, spoiled
from zjax import rl

LABELS = np.array([True, False, False, True, True, False])
WEIGHTS = {"desirable_weight": 1.5, "undesirable_weight": 0.5}


def sequences(logprobs, mask=MASK):
    return rl.sequence_logprobs(jnp.asarray(logprobs), jnp.asarray(mask))


def divergence_of(policy, reference=REF, mask=MASK):
    return rl.kto_divergence(sequences(policy, mask), sequences(reference, mask))


def mean_of(policy, divergence, reference=REF, mask=MASK, labels=LABELS, **arguments):
    policy, reference = sequences(policy, mask), sequences(reference, mask)
    losses = rl.kto_loss(
        policy, reference, jnp.asarray(labels), divergence, **arguments
    )
    return rl.example_mean(losses, policy.is_real)


def expected_mean(divergence, beta=0.1):
    ratios = ((NEW - REF) * MASK).sum(1)
    ahead = beta * (ratios - max(divergence, 0))
    losses = 1 - 1 / (1 + np.exp(np.where(LABELS, -ahead, ahead)))
    return np.mean(np.where(LABELS, 1.5, 0.5) * losses)


@pytest.mark.parametrize("divergence", [0.7, -0.7])
@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_means_equal_the_formula(divergence, beta):
    """The divergence is clipped at 0."""
    with jax.enable_x64(True):
        found = mean_of(NEW, jnp.float64(divergence), beta=beta, **WEIGHTS).mean
    np.testing.assert_allclose(found, expected_mean(divergence, beta), rtol=1e-12)


def test_divergences_are_means_of_sums_with_their_sign():
    """Fails if single terms are clipped, or if terms are means over tokens."""
    ratios = ((OLD - REF) * MASK).sum(1)
    assert ratios.min() < 0 < ratios.max()
    with jax.enable_x64(True):
        found = divergence_of(OLD)
    np.testing.assert_allclose(found, (ratios.sum(), 6), rtol=1e-12)


def test_gradients_equal_finite_differences():
    def loss(x):
        return mean_of(x, jnp.float64(0.3), **WEIGHTS).mean

    found = assert_gradient(loss, NEW)
    assert not found[~MASK].any()
    assert (found[LABELS] <= 0).all()
    assert (found[~LABELS] >= 0).all()


def test_divergence_and_reference_get_no_gradient():
    def through_divergence(x):
        return mean_of(NEW, divergence_of(x).mean).mean

    assert through_divergence(OLD + 1.0) != through_divergence(OLD + 2.0)
    assert not jax.grad(through_divergence)(jnp.asarray(OLD + 1.0)).any()
    through_reference = jax.grad(lambda x: mean_of(NEW, jnp.float32(0.1), x).mean)
    assert not through_reference(jnp.asarray(REF)).any()


@pytest.mark.parametrize("num_microbatches", [2, 4])
def test_trap_1_no_split_changes_loss_or_gradient(num_microbatches):
    """Divergence and loss are sums over the step, each divided once."""
    rows = np.arange(12) % 6
    mask = MASK[rows]
    mask[10:] = False
    rest = REF[rows], mask, LABELS[rows]

    def split(x, num_parts):
        parts = [np.split(a, num_parts) for a in rest]
        pieces = list(zip(jnp.split(x, num_parts), *parts, strict=True))
        total = jax.tree.map(
            lambda *sums: sum(sums),
            *(divergence_of(x + 1.0, reference, m) for x, reference, m, _ in pieces),
        )
        found = [
            mean_of(x, total.mean, reference, m, labels)
            for x, reference, m, labels in pieces
        ]
        return sum(x.loss_sum for x in found) / sum(x.weight for x in found)

    with jax.enable_x64(True):
        found, expected = (
            jax.jit(jax.value_and_grad(functools.partial(split, num_parts=n)))(
                jnp.asarray(NEW[rows])
            )
            for n in (num_microbatches, 1)
        )
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_trap_5_tokens_outside_the_mask_reach_nothing(value):
    def loss(x, reference):
        divergence = divergence_of(x, reference).mean
        return mean_of(x, divergence, reference).mean

    found = jax.value_and_grad(loss)(spoiled(NEW, value), spoiled(REF, value))
    clean = jax.value_and_grad(loss)(NEW, REF)
    jax.tree.map(np.testing.assert_array_equal, found, clean)


@pytest.mark.parametrize("ratio", [1e4, -1e4])
def test_extreme_ratios_are_finite(ratio):
    n = jnp.array([1, 1])

    def loss(x, divergence):
        policy, reference = (rl.SequenceLogprobs(y, n) for y in (x, jnp.zeros(2)))
        labels = jnp.array([True, False])
        return rl.kto_loss(policy, reference, labels, divergence).sum()

    for divergence in (0.0, 1e4):
        found = jax.value_and_grad(loss)(jnp.full(2, ratio), jnp.float32(divergence))
        np.testing.assert_allclose(found[0], 1.0, rtol=1e-6)
        assert np.isfinite(found[1]).all()


def test_weights_below_zero_are_refused():
    text = "=-1.0 is not a number of 0 or more; use 0 or a positive number"
    with config_error(f"desirable_weight{text}\nundesirable_weight{text}"):
        mean_of(NEW, jnp.float32(0.0), desirable_weight=-1.0, undesirable_weight=-1.0)


def test_beta_is_above_zero():
    with config_error("beta=-0.1 is not a number above 0; use a positive number"):
        mean_of(NEW, jnp.float32(0.0), beta=-0.1)
