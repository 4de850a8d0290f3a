"""Global norm and clipping against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zjax.optim import transforms


def make_grads(scale):
    rng = np.random.default_rng(0)
    shapes = {"kernel": (64, 33), "bias": (7,), "gain": ()}
    return {k: np.float32(scale * rng.normal(size=s)) for k, s in shapes.items()}


@pytest.mark.parametrize("max_norm", [1e-8, 0.5, 1.0, 1e9])
@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 1e4])
def test_clipping_equals_numpy(scale, max_norm):
    """The least of both: 1e-6 beside a norm of 5e-8 is most of the divisor."""
    grads = make_grads(scale)
    wide = {k: np.float64(g) for k, g in grads.items()}
    norm = np.sqrt(sum(np.sum(g**2) for g in wide.values()))
    divisor = max(1.0, (norm + 1e-6) / max_norm)

    mine = jax.jit(transforms.global_norm)(grads)
    np.testing.assert_allclose(mine, norm, rtol=1e-6)
    clipped = jax.jit(lambda g, n: transforms.clip_by_norm(g, n, max_norm))(grads, mine)
    for name, g in wide.items():
        np.testing.assert_allclose(clipped[name], g / divisor, rtol=2e-6)


def test_infinite_limit_changes_no_bit():
    grads = make_grads(1e4)
    clipped = transforms.clip_by_norm(grads, jnp.float32(1e9), float("inf"))
    for name, g in grads.items():
        np.testing.assert_array_equal(clipped[name], g)


def test_norm_of_bfloat16_is_summed_in_float32():
    """In bfloat16 the sum of 4100 ones would be 4096."""
    norm = transforms.global_norm(jnp.ones(4100, jnp.bfloat16))
    np.testing.assert_allclose(norm, np.sqrt(4100), rtol=1e-6)


def test_clipping_of_bfloat16_rounds_once():
    """Fails if the divisor, 1.004, is rounded to bfloat16, which has 1 and 1.0078."""
    grads = jnp.arange(1, 129, dtype=jnp.bfloat16)
    clipped = transforms.clip_by_norm(grads, jnp.float32(1.004), 1.0)
    expected = (np.arange(1, 129) / 1.004001).astype(jnp.bfloat16)
    np.testing.assert_array_equal(clipped, expected)


def test_clipping_keeps_dtypes():
    tree = [jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.float32)]
    clipped = transforms.clip_by_norm(tree, transforms.global_norm(tree), 0.1)
    assert [x.dtype.name for x in clipped] == ["bfloat16", "float32"]


def test_norm_of_nothing_is_zero():
    assert transforms.global_norm({}) == 0.0
