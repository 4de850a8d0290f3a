import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.refusals import config_error
from tests.support.rl import assert_gradient
from zjax import rl

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(3, 4, 7))
TOKENS = RNG.integers(0, 7, size=(3, 4)).astype(np.int32)
MASK = np.arange(4) < np.array([4, 2, 1])[:, None]
TEMPERATURE = pytest.mark.parametrize("temperature", [1.0, 0.6])


def expected_logprobs(logits, temperature=1.0):
    scores = np.asarray(logits, np.float64) / temperature
    scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
    return np.where(MASK, np.take_along_axis(scores, TOKENS[..., None], 2)[..., 0], 0)


def logprobs(logits, temperature=1.0, mask=MASK, tokens=TOKENS):
    arrays = jnp.asarray(logits), jnp.asarray(tokens), jnp.asarray(mask)
    return rl.token_logprobs(*arrays, temperature=temperature)


@TEMPERATURE
def test_trap_3_logprobs_are_of_logits_over_the_temperature(temperature):
    with jax.enable_x64(True):
        found = logprobs(LOGITS, temperature)
    expected = expected_logprobs(LOGITS, temperature)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@TEMPERATURE
def test_gradients_equal_finite_differences(temperature):
    weights = RNG.normal(size=MASK.shape)
    found = assert_gradient(
        lambda x: (logprobs(x, temperature) * jnp.asarray(weights)).sum(), LOGITS
    )
    assert not found[~MASK].any()


def test_trap_9_bfloat16_logits_have_a_softmax_of_float32():
    """A softmax in bfloat16 is 1e-2 away."""
    logits = jnp.asarray(LOGITS, jnp.bfloat16)
    found, gradient = jax.value_and_grad(lambda x: logprobs(x).sum())(logits)
    assert (found.dtype, gradient.dtype) == (jnp.float32, jnp.bfloat16)
    expected = expected_logprobs(np.asarray(logits, np.float64)).sum()
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_no_array_of_the_vocabulary_is_stored():
    """Fails if residuals of the backward pass include a softmax of float32."""
    logits = jnp.zeros((2, 3, 50), jnp.bfloat16)
    given = jnp.zeros((2, 3), jnp.int32), jnp.ones((2, 3), bool)
    _, backward = jax.vjp(lambda x: rl.token_logprobs(x, *given), logits)
    stored = [x for x in jax.tree.leaves(backward) if x.size >= logits.size]
    assert [(x.shape, x.dtype) for x in stored] == [(logits.shape, logits.dtype)]


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_trap_5_tokens_outside_the_mask_reach_nothing(value):
    spoiled = np.where(MASK[..., None], LOGITS, value)
    tokens = np.where(MASK, TOKENS, -100)

    def total(x, tokens):
        return logprobs(x, tokens=tokens).sum()

    found = jax.value_and_grad(total)(jnp.asarray(spoiled), tokens)
    clean = jax.value_and_grad(total)(jnp.asarray(LOGITS), TOKENS)
    jax.tree.map(np.testing.assert_array_equal, found, clean)


def test_excluded_tokens_are_minus_infinity_and_harm_no_gradient():
    logits = jnp.array([[0.0, 0.0, -jnp.inf]])
    mask = jnp.array([True])
    found = rl.token_logprobs(logits, jnp.array([0]), mask)
    np.testing.assert_allclose(found, np.log(0.5), rtol=1e-6)
    assert rl.token_logprobs(logits, jnp.array([2]), mask) == -jnp.inf
    gradient = jax.grad(lambda x: rl.token_logprobs(x, jnp.array([0]), mask)[0])
    np.testing.assert_allclose(gradient(logits), [[0.5, -0.5, 0.0]], rtol=1e-6)


@pytest.mark.parametrize("token", [-1, 7])
def test_invalid_tokens_are_nan(token):
    found = logprobs(LOGITS, tokens=np.where(TOKENS == TOKENS[0, 0], token, TOKENS))
    np.testing.assert_array_equal(np.isnan(found), MASK & (TOKENS == TOKENS[0, 0]))


@pytest.mark.parametrize(("token", "expected"), [(0, 0.0), (1, -2e4)])
def test_large_logits_are_finite(token, expected):
    def value(x):
        return rl.token_logprobs(x, jnp.array([token]), jnp.array([True]))[0]

    found, gradient = jax.value_and_grad(value)(jnp.array([[1e4, -1e4]]))
    assert found == expected
    np.testing.assert_array_equal(gradient, [[-token, token]])


def test_temperature_is_above_zero():
    with config_error("temperature=0.0 is not a number above 0; use a positive number"):
        logprobs(LOGITS, temperature=0.0)


def test_sums_and_means_are_over_the_mask():
    values = jnp.asarray(np.where(MASK, RNG.normal(size=MASK.shape), np.nan))
    found = rl.sequence_logprobs(values, jnp.asarray(MASK))
    np.testing.assert_allclose(found.sums, np.nansum(values, 1), rtol=1e-6)
    np.testing.assert_allclose(found.means, np.nanmean(values, 1), rtol=1e-6)
    np.testing.assert_array_equal(found.num_tokens, [4, 2, 1])


def test_sums_of_bfloat16_are_float32():
    values = jnp.full((1, 300), -1.01, jnp.bfloat16)
    found = rl.sequence_logprobs(values, jnp.ones((1, 300), bool))
    np.testing.assert_allclose(found.sums, 300 * values[0, 0].astype(float), rtol=1e-6)


def test_sequences_without_tokens_are_zero():
    found = rl.SequenceLogprobs(jnp.array([jnp.nan, -3.0]), jnp.array([0, 2]))
    np.testing.assert_array_equal(found.totals, [0.0, -3.0])
    np.testing.assert_array_equal(found.means, [0.0, -1.5])
    np.testing.assert_array_equal(found.is_real, [False, True])
