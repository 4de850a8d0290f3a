import jax.numpy as jnp
import numpy as np
import pytest

from tests.reference import attention as reference
from zjax.ops import norm

RNG = np.random.default_rng(0)
X = 3.0 + RNG.normal(size=(2, 5, 16)).astype(np.float32)
SCALE, BIAS = RNG.normal(size=(2, 16)).astype(np.float32)


@pytest.mark.parametrize("bias", [None, BIAS], ids=["without-bias", "with-bias"])
def test_layer_norm_equals_the_reference(bias):
    given = None if bias is None else jnp.array(bias)
    found = norm.layer_norm(jnp.array(X), jnp.array(SCALE), given, eps=0.1)
    expected = reference.layer_norm(X, SCALE, bias, 0.1)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_float32_keeps_its_digits_far_from_zero():
    """Fails if the variance is a difference of large numbers."""
    x = np.float32(1000 + RNG.normal(size=(4, 256)))
    scale = np.ones(256, np.float32)
    found = norm.layer_norm(jnp.array(x), jnp.array(scale), eps=1e-5)
    expected = reference.layer_norm(x, scale, None, 1e-5)
    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_bfloat16_stays_finite_where_it_has_no_digits():
    x = jnp.full((2, 256), 1000, jnp.bfloat16)
    found = norm.layer_norm(x, jnp.ones(256, jnp.bfloat16), eps=1e-12)
    assert np.isfinite(np.float32(found)).all()


def test_rms_norm_equals_the_reference():
    found = norm.rms_norm(jnp.array(X), jnp.array(SCALE), eps=0.1)
    np.testing.assert_allclose(found, reference.rms_norm(X, SCALE, 0.1), atol=1e-5)


@pytest.mark.parametrize("function", [norm.layer_norm, norm.rms_norm])
def test_bfloat16_input_is_normalised_in_float32(function):
    """Fails if the mean or the variance is taken in bfloat16."""
    narrow, scale = jnp.bfloat16(X), jnp.bfloat16(SCALE)
    found = function(narrow, scale)
    expected = function(narrow.astype(jnp.float32), scale.astype(jnp.float32))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, expected.astype(jnp.bfloat16))
