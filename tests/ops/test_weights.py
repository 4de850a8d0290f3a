"""float32 weights as bfloat16 and 16 low bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zjax.ops.weights import join_bits, low_bits

EVERY_UPPER = np.arange(2**16, dtype=np.uint32) << 16


def halved(x):
    return join_bits(x.astype(jnp.bfloat16), low_bits(x))


@pytest.mark.parametrize("of", [halved, jax.jit(halved)], ids=["NumPy", "compiled"])
@pytest.mark.parametrize("low", [0, 1, 0x1234, 0x7FFF, 0x8001, 0xBEEF, 0xFFFF])
def test_weights_come_back_as_they_were(of, low):
    """Every exponent and both signs; what is no number stays none."""
    bits = EVERY_UPPER + np.uint32(low)
    x = bits.view(np.float32)
    with np.errstate(invalid="ignore"):
        found = np.asarray(of(x))
    numbers = ~np.isnan(x)
    np.testing.assert_array_equal(found.view(np.uint32)[numbers], bits[numbers])
    assert np.isnan(found[~numbers]).all()


@pytest.mark.parametrize("of", [halved, jax.jit(halved)], ids=["NumPy", "compiled"])
def test_weights_half_way_are_off_by_one_at_most(of):
    """Fails if a half that is too large for 16 bits wraps round."""
    bits = EVERY_UPPER + np.uint32(0x8000)
    x = bits.view(np.float32)
    numbers = np.isfinite(x)
    with np.errstate(invalid="ignore"):
        found = np.asarray(of(x)).view(np.int32)[numbers]
    away = np.abs(found.astype(np.int64) - bits.view(np.int32)[numbers])
    assert set(away) == {0, 1}


def test_halves_stay_as_they_are():
    """Fails if a step that changes nothing moves a weight."""
    lower = np.arange(-(2**15), 2**15, dtype=np.int16)
    for upper in np.array([1.0, -3e-5, 0.0], jnp.bfloat16):
        whole = join_bits(np.full(lower.shape, upper), lower)
        again = halved(whole)
        np.testing.assert_array_equal(halved(again), again)
