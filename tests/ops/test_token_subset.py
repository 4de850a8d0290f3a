"""Subsets of tokens, against loops over rows and tokens in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zjax.ops.tokens import draw_subset, on_subset

ROWS, LENGTH, WIDTH, KEPT = 3, 8, 4, 5
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
MATRIX = RNG.normal(size=(WIDTH, WIDTH)).astype(np.float32)
INDICES = jnp.array([[0, 2, 3, 6, 7], [1, 2, 4, 5, 6], [0, 1, 2, 3, 4]])
DROPPED = np.ones((ROWS, LENGTH), bool)
np.put_along_axis(DROPPED, np.asarray(INDICES), False, axis=1)


def layer(x, matrix=MATRIX):
    """Mixes neighbours, so that the order of the tokens counts."""
    return jnp.tanh(x @ matrix) + jnp.cumsum(x, axis=1), ()


def by_loops(x):
    y = x.copy()
    for row, indices in enumerate(np.asarray(INDICES)):
        part = np.stack([x[row, i] for i in indices])
        new = np.tanh(part @ MATRIX) + np.cumsum(part, axis=0)
        for i, token in zip(indices, new, strict=True):
            y[row, i] = token
    return y


def test_layer_replaces_its_tokens_alone():
    """The others are the same bits; fails if they are lost, or in another order."""
    y = np.asarray(jax.jit(lambda x: on_subset(layer, x, INDICES)[0])(X))
    np.testing.assert_allclose(y, by_loops(X), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(y[DROPPED], X[DROPPED])


def test_gradients_are_those_of_finite_differences():
    """A dropped token has the outgoing gradient, one that is kept the layer's alone."""
    weights = RNG.normal(size=X.shape)
    with jax.enable_x64(True):

        def loss(x):
            return jnp.sum(on_subset(layer, x, INDICES)[0] * weights)

        found = jax.grad(loss)(jnp.asarray(X, jnp.float64))
        steps = 1e-6 * np.eye(X.size).reshape(-1, *X.shape)
        ahead, behind = (jax.vmap(loss)(X + sign * steps) for sign in (1, -1))
        wanted = np.asarray((ahead - behind) / 2e-6).reshape(X.shape)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(np.asarray(found)[DROPPED], weights[DROPPED])


def test_backward_pass_writes_the_rows_of_the_subset_alone():
    """No sum, product or copy of the whole stream, in no dtype."""
    x = jnp.asarray(X, jnp.bfloat16)

    def backward(x, cotangent):
        _, pull = jax.vjp(lambda x: on_subset(lambda x: (2 * x, ()), x, INDICES)[0], x)
        return pull(cotangent)

    jaxpr = jax.make_jaxpr(backward)(x, x)
    whole = [
        equation.primitive.name
        for equation in jaxpr.eqns
        if equation.outvars[0].aval.shape == X.shape
        and not equation.primitive.name.startswith("custom_vjp")
    ]
    assert whole == ["scatter"]


@pytest.mark.parametrize("num_kept", [1, KEPT, LENGTH])
def test_subsets_are_sorted_and_uniform(num_kept):
    """Each token has the same chance, rows and layers are independent."""
    keys = jax.random.split(jax.random.key(0), 2000)

    def draw(key):
        return draw_subset(key, num_rows=2, length=LENGTH, num_kept=num_kept)

    indices = np.asarray(jax.jit(jax.vmap(draw))(keys))
    assert indices.shape == (2000, 2, num_kept)
    assert (np.diff(indices, axis=-1) > 0).all()
    is_kept = np.zeros((2000, 2, LENGTH))
    np.put_along_axis(is_kept, indices, 1, axis=-1)
    share = num_kept / LENGTH
    spread = 4 * np.sqrt(share * (1 - share) / 2000)
    assert np.abs(is_kept.mean(axis=0) - share).max() <= spread
    pairs = (is_kept[:, 0] - share) * (is_kept[:, 1] - share)  # of two rows
    layers = (is_kept[1:, 0] - share) * (is_kept[:-1, 0] - share)  # of two keys
    for products in (pairs, layers):
        assert abs(products.mean()) <= 4 * share * (1 - share) / np.sqrt(2000 * 7)


def test_rows_of_devices_draw_as_rows_of_one_batch():
    """Fails if a row draws by its place on its device."""
    key = jax.random.key(1)
    mesh = jax.make_mesh((4,), ("data",))
    draw = jax.shard_map(
        lambda: draw_subset(key, num_rows=2, length=LENGTH, num_kept=KEPT),
        mesh=mesh,
        in_specs=(),
        out_specs=jax.P("data"),
        check_vma=False,
    )
    wanted = draw_subset(key, num_rows=8, length=LENGTH, num_kept=KEPT)
    np.testing.assert_array_equal(jax.jit(draw)(), wanted)
