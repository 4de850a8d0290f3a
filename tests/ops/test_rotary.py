import jax.numpy as jnp
import numpy as np

from tests.reference import attention as reference
from zjax.ops import rotary

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 6, 3, 8)).astype(np.float32)
POSITIONS = RNG.integers(0, 5000, size=(2, 6))


def test_rotation_equals_the_reference():
    tables = rotary.make_rotary_tables(jnp.array(POSITIONS), head_size=8, theta=500.0)
    expected = reference.rotate(X, POSITIONS, 500.0)
    np.testing.assert_allclose(
        rotary.rotate(jnp.array(X), *tables), expected, atol=2e-3
    )


def test_adjacent_channels_rotate_as_halves_that_were_interleaved():
    """Fails if pairs are others, or channels that do not rotate move."""
    tables = rotary.make_rotary_tables(jnp.array(POSITIONS), head_size=6)
    interleaved = X[..., [0, 3, 1, 4, 2, 5, 6, 7]]
    np.testing.assert_array_equal(
        rotary.rotate(jnp.array(interleaved), *tables, "adjacent"),
        rotary.rotate(jnp.array(X), *tables),
    )


def test_scores_depend_on_distance_alone():
    def score(query_position, key_position):
        positions = jnp.array([[query_position, key_position]])
        tables = rotary.make_rotary_tables(positions, head_size=8)
        q, k = rotary.rotate(jnp.array(X[:1, :2]), *tables)[0]
        return np.sum(q * k)

    np.testing.assert_allclose(score(7, 3), score(107, 103), rtol=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-2


def test_bfloat16_heads_are_rotated_in_float32():
    """Fails if the tables or the products are bfloat16: positions would collide."""
    positions = jnp.array([[4000, 4001, 4002, 4003, 4004, 4005]] * 2)
    tables = rotary.make_rotary_tables(positions, head_size=8)
    assert tables[0].dtype == jnp.float32
    narrow = jnp.bfloat16(X)
    expected = rotary.rotate(narrow.astype(jnp.float32), *tables).astype(jnp.bfloat16)
    np.testing.assert_array_equal(rotary.rotate(narrow, *tables), expected)
