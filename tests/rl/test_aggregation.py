import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.refusals import config_error
from tests.support.rl import ADVANTAGES, MASK, NEW, assert_gradient, spoiled
from zjax import rl

AGGREGATIONS = {
    "token_mean": rl.token_mean,
    "sequence_mean": rl.sequence_mean,
    "constant_mean": functools.partial(rl.constant_mean, length=5),
}
each = pytest.mark.parametrize("aggregate", AGGREGATIONS.values(), ids=AGGREGATIONS)


@each
def test_gradients_equal_finite_differences(aggregate):
    assert_gradient(lambda x: aggregate(x**2, jnp.asarray(MASK)).mean, NEW)


@each
@pytest.mark.parametrize("num_microbatches", [2, 4, "uneven"])
def test_trap_1_no_split_changes_loss_or_gradient(aggregate, num_microbatches):
    """Fails if a microbatch divides by a count of its own."""
    rows = np.arange(8) % 6  # of 5, 3, 1, 4, 2, 5, 5, 3 tokens
    mask = jnp.asarray(MASK[rows]).at[4].set(False)
    ends = [1, 6] if num_microbatches == "uneven" else num_microbatches

    def sums(x, mask):
        return aggregate(x * jnp.asarray(ADVANTAGES[rows][: len(x)]), mask)

    def split(x):
        losses = x * jnp.asarray(ADVANTAGES[rows])
        parts = zip(jnp.split(losses, ends), jnp.split(mask, ends), strict=True)
        found = [aggregate(*part) for part in parts]
        return sum(x.loss_sum for x in found) / sum(x.weight for x in found)

    with jax.enable_x64(True):
        whole = jax.jit(jax.value_and_grad(lambda x: sums(x, mask).mean))
        x = jnp.asarray(NEW[rows])
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-15),
            jax.jit(jax.value_and_grad(split))(x),
            whole(x),
        )


@each
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_trap_5_tokens_outside_the_mask_reach_nothing(aggregate, value):
    @jax.jit
    @jax.value_and_grad
    def loss(x):
        return aggregate(x, jnp.asarray(MASK)).mean

    found = loss(jnp.asarray(spoiled(NEW, value)))
    clean = loss(jnp.asarray(NEW))
    jax.tree.map(np.testing.assert_array_equal, found, clean)
    assert not np.asarray(found[1])[~MASK].any()


@each
def test_a_row_of_padding_counts_as_no_sequence(aggregate):
    """Fails if rows are counted: padding of a microbatch would dilute its loss."""
    x, mask = jnp.asarray(NEW), jnp.asarray(MASK)
    expected = jax.jit(aggregate)(x, mask)
    padded = (np.pad(each, ((0, 2), (0, 0))) for each in (x, mask))
    found = jax.jit(aggregate)(*map(jnp.asarray, padded))
    assert found.weight == expected.weight
    np.testing.assert_allclose(found.loss_sum, expected.loss_sum, rtol=1e-6)


@each
def test_no_tokens_weigh_nothing(aggregate):
    @jax.jit
    @jax.value_and_grad
    def loss(x):
        return aggregate(x, jnp.zeros(x.shape, bool)).mean

    value, gradient = loss(jnp.full((2, 3), jnp.nan))
    assert value == 0
    assert not np.asarray(gradient).any()


@each
def test_sums_of_narrow_losses_are_float32(aggregate):
    losses = jnp.full((1, 300), 1.01, jnp.bfloat16)
    found = jax.jit(aggregate)(losses, jnp.ones((1, 300), bool))
    assert {x.dtype for x in found} == {np.dtype("float32")}
    np.testing.assert_allclose(found.mean * found.weight, found.loss_sum, rtol=1e-6)


def test_a_length_below_1_is_refused():
    with config_error("length=0 is below 1; use the limit of generated tokens"):
        rl.constant_mean(jnp.ones((1, 1)), jnp.ones((1, 1), bool), length=0)
