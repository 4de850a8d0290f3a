import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zjax.ops import activation

X, Y = np.random.default_rng(0).normal(size=(2, 5, 7)).astype(np.float32)


@pytest.mark.parametrize(
    ("function", "args"), [(activation.gelu, (X,)), (activation.swiglu, (X, Y))]
)
def test_backward_pass_keeps_what_entered(function, args):
    """Fails if passes that are apart keep more than the formula of memory counts."""
    _, pull = jax.vjp(function, *args)
    kept = [x for x in jax.tree.leaves(pull) if jnp.size(x) > 1]
    assert len(kept) == len(args)
    for x, given in zip(kept, args, strict=True):
        np.testing.assert_array_equal(x, given)


def test_values_and_slopes():
    slopes = jax.vmap(jax.grad(activation.gelu))(X.reshape(-1))
    inner = np.sqrt(2 / np.pi) * (X + 0.044715 * X**3)
    steep = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * X**2)
    expected = 0.5 * (1 + np.tanh(inner)) + 0.5 * X * steep / np.cosh(inner) ** 2
    np.testing.assert_allclose(slopes.reshape(X.shape), expected, rtol=1e-4, atol=1e-5)
    found = activation.swiglu(X, Y)
    np.testing.assert_allclose(found, X / (1 + np.exp(-X)) * Y, rtol=1e-5)
