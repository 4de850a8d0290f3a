import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.refusals import config_error
from tests.support.rl import (
    ADVANTAGES,
    GOLDEN,
    MASK,
    NEW,
    OLD,
    REF,
    SAMPLER,
    assert_gradient,
    spoiled,
)
from zjax import rl

DAPO = {"low": 0.2, "high": 0.28}
GSPO = {"low": 3e-4, "high": 4e-4}


def two_sided_loss(ratios, advantages, low, high, bound):
    """The loss of INTELLECT-2, as its paper writes it."""
    capped = jnp.minimum(ratios, bound) * advantages
    clipped = jnp.clip(ratios, 1 - low, 1 + high) * advantages
    return -jnp.minimum(capped, clipped)


def lifted(loss):
    """A loss of arrays of NumPy, too, with golden inputs in place of missing ones."""

    @functools.wraps(loss)
    def of_arrays(x, old=OLD, advantages=ADVANTAGES, mask=MASK):
        return loss(*map(jnp.asarray, (x, old, advantages, mask)))

    return of_arrays


def total(losses):
    """The mean over golden tokens."""
    return rl.token_mean(losses, jnp.asarray(MASK)).mean


@lifted
def clip(x, old, advantages, mask):
    return rl.clip_loss(rl.token_ratios(x, old, mask), advantages, mask, **DAPO)


def corrected(weigh):
    @lifted
    def loss(x, old, advantages, mask):
        return clip(x, old, advantages, mask) * weigh(old, mask)

    return loss


def by(loss, **settings):
    """A loss of ratios of tokens, as a function of log-probabilities."""

    @lifted
    def of_logprobs(x, old, advantages, mask):
        ratios = rl.token_ratios(x, old, mask)
        return loss(ratios, advantages, mask, **settings)

    return of_logprobs


@lifted
def gspo(x, old, advantages, mask):
    ratios = rl.sequence_ratios(x, old, mask)
    return rl.clip_loss(ratios, advantages, mask, **GSPO)


@lifted
def cispo(x, old, advantages, mask):
    ratios = rl.token_ratios(x, old, mask)
    return rl.cispo_loss(x, ratios, advantages, mask)


@lifted
def reinforce(x, old, advantages, mask):
    return rl.reinforce_loss(x, advantages, mask)


@lifted
def with_k3(x, old, advantages, mask):
    return clip(x, old, advantages, mask) + 0.04 * rl.kl_k3(x, jnp.asarray(REF), mask)


def token_tis(old, mask):
    weights = rl.token_weights(old, jnp.asarray(SAMPLER), mask)
    return rl.truncate_weights(weights, bound=2.0)


def sequence_mask(old, mask):
    weights = rl.sequence_weights(old, jnp.asarray(SAMPLER), mask)
    return rl.mask_weights(weights, bound=3.0)


LOSSES = {
    "clip": clip,
    "dual_clip_3": by(rl.dual_clip_loss, **DAPO, bound=3.0),
    "dual_clip_1.1": by(rl.dual_clip_loss, **DAPO, bound=1.1),
    "gspo": gspo,
    "cispo": cispo,
    "sapo_1.0_1.05": by(rl.sapo_loss),
    "clip_token_tis_2": corrected(token_tis),
    "clip_sequence_mask_3": corrected(sequence_mask),
    "clip_plus_0.04_k3": with_k3,
}
AGGREGATIONS = {
    "token_mean": rl.token_mean,
    "sequence_mean_token_mean": rl.sequence_mean,
    "dr_grpo_constant_T": lambda x, mask: rl.constant_mean(x, mask, length=5),
    "sequence_mean_token_sum": lambda x, mask: rl.constant_mean(x, mask, length=1),
}
ALL = LOSSES | {"reinforce": reinforce}
each = pytest.mark.parametrize("loss", ALL.values(), ids=ALL)


def test_every_golden_loss_is_compared():
    assert {*LOSSES} == {*GOLDEN["losses"]}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_values_are_golden(name, aggregation):
    with jax.enable_x64(True):
        found = AGGREGATIONS[aggregation](LOSSES[name](NEW), jnp.asarray(MASK)).mean
    expected = GOLDEN["losses"][name][aggregation]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("name", ["clip", "gspo", "cispo"])
def test_gradients_are_golden(name):
    with jax.enable_x64(True):
        found = jax.grad(lambda x: total(LOSSES[name](x)))(jnp.asarray(NEW))
    expected = GOLDEN["gradients_token_mean"][name]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", [x for x in LOSSES if x not in ("gspo", "cispo")])
def test_gradients_equal_finite_differences(name):
    """Of all losses whose gradient is that of their value."""
    found = assert_gradient(lambda x: total(LOSSES[name](x)), NEW)
    assert np.any(found[MASK])


def test_the_gradient_of_reinforce_equals_finite_differences():
    found = assert_gradient(lambda x: total(reinforce(x)), NEW)
    expected = np.where(MASK, -ADVANTAGES / MASK.sum(), 0)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


def test_the_gradient_of_cispo_is_of_constant_weights():
    """Of `weight * A * logprob` with the weights of this point; a bound acts."""
    weights = np.minimum(np.exp(NEW - OLD), 1.1)

    def constant(x):
        return total(-weights * ADVANTAGES * x)

    @lifted
    def cispo(x, old, advantages, mask):
        ratios = rl.token_ratios(x, old, mask)
        return rl.cispo_loss(x, ratios, advantages, mask, bound=1.1)

    expected = assert_gradient(constant, NEW)
    with jax.enable_x64(True):
        found = jax.grad(lambda x: total(cispo(x)))(jnp.asarray(NEW))
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


def test_the_gradient_of_gspo_is_of_ratios_of_sequences():
    """By means of sequences, as the paper has it, whose ratio depends on all tokens."""

    def of_the_paper(x):
        counts = MASK.sum(1, keepdims=True)
        gaps = jnp.where(MASK, x - OLD, 0).sum(1, keepdims=True) / counts
        ratios = jnp.exp(gaps)
        clipped = jnp.clip(ratios, 1 - GSPO["low"], 1 + GSPO["high"])
        return -jnp.minimum(ratios * ADVANTAGES, clipped * ADVANTAGES).mean()

    expected = assert_gradient(of_the_paper, NEW)
    with jax.enable_x64(True):
        mask = jnp.asarray(MASK)
        found = jax.value_and_grad(lambda x: rl.sequence_mean(gspo(x), mask).mean)(
            jnp.asarray(NEW)
        )
        np.testing.assert_allclose(found[0], of_the_paper(jnp.asarray(NEW)), rtol=1e-12)
    np.testing.assert_allclose(found[1], expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("bound", [1.3, 4.0])
def test_a_dual_clip_is_the_two_sided_clip(bound):
    ratios = jnp.asarray(np.geomspace(0.1, 10, MASK.size).reshape(MASK.shape))
    mask, advantages = jnp.ones_like(ratios, bool), jnp.asarray(ADVANTAGES)
    found = rl.dual_clip_loss(ratios, advantages, mask, **DAPO, bound=bound)
    expected = two_sided_loss(ratios, advantages, **DAPO, bound=bound)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert (found != rl.clip_loss(ratios, advantages, mask, **DAPO)).any()


def test_decoupled_ends_clip_apart():
    ratios = jnp.array([[0.75, 1.25, 1.35]])
    mask = jnp.ones((1, 3), bool)
    found = rl.clip_loss(ratios, jnp.array([[1.0]]), mask, **DAPO)
    np.testing.assert_allclose(found, [[-0.75, -1.25, -1.28]], rtol=1e-6)
    found = rl.clip_loss(ratios, jnp.array([[-1.0]]), mask, **DAPO)
    np.testing.assert_allclose(found, [[0.8, 1.25, 1.35]], rtol=1e-6)


ALONE = [name for name in ALL if not name.startswith("clip_")]
"""Losses without a second term and without weights."""


@pytest.mark.parametrize("name", ALONE)
def test_trap_4_with_one_update_ratios_are_1_and_gradients_flow(name):
    """Fails if equal policies stop the gradient: it is the gradient of REINFORCE."""
    x, mask = jnp.asarray(NEW), jnp.asarray(MASK)

    def gradient(loss):
        return jax.grad(lambda x: rl.sequence_mean(loss(x, x), mask).mean)(x)

    assert (rl.token_ratios(x, x, mask) == 1).all()
    assert (rl.sequence_ratios(x, x, mask) == 1).all()
    np.testing.assert_allclose(gradient(ALL[name]), gradient(reinforce), rtol=1e-5)


def test_trap_4_the_sampler_is_not_the_old_policy():
    """Fails if weights enter the ratio: a clip would then act on the sampler's gap."""
    old, sampler = jnp.array([[-1.0]]), jnp.array([[-2.0]])
    mask, advantage = jnp.array([[True]]), jnp.array([[1.0]])

    def gradient(x, weights, old):
        return jax.grad(
            lambda x: (
                weights * rl.clip_loss(rl.token_ratios(x, old, mask), advantage, mask)
            ).sum()
        )(x)

    weights = rl.truncate_weights(rl.token_weights(old, sampler, mask), bound=2.0)
    assert gradient(old, weights, old).tolist() == [[-2.0]]
    assert gradient(old, 1.0, sampler).tolist() == [[0.0]]


@each
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_trap_5_values_outside_the_mask_reach_nothing(loss, value):
    def total_of(x, old, advantages):
        return total(loss(x, old, advantages))

    advantages = np.broadcast_to(ADVANTAGES, MASK.shape)
    arrays = [jnp.asarray(x, jnp.float32) for x in (NEW, OLD, advantages)]
    bad = [jnp.asarray(spoiled(np.asarray(x), value)) for x in arrays]
    found = jax.value_and_grad(total_of)(*bad)
    expected = jax.value_and_grad(total_of)(*arrays)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert not np.asarray(loss(*bad))[~MASK].any()


@each
@pytest.mark.parametrize("gap", [-1e4, 1e4])
def test_ratios_that_overflow_have_finite_gradients(loss, gap):
    """Fails if an exponential is infinite: 0 times infinity is NaN."""
    x = jnp.asarray(NEW, jnp.float32)
    old = x - gap
    found = jax.value_and_grad(lambda x: loss(x, old).sum())(x)
    assert all(np.isfinite(y).all() for y in found)


def test_trap_9_narrow_logprobs_are_subtracted_in_float32():
    new = jnp.asarray(NEW, jnp.bfloat16)
    old = jnp.asarray(OLD, jnp.bfloat16)
    wide = [x.astype(jnp.float32) for x in (new, old)]
    for ratios in (rl.token_ratios, rl.sequence_ratios):
        found = ratios(new, old, jnp.asarray(MASK))
        assert found.dtype == jnp.float32
        np.testing.assert_array_equal(found, ratios(*wide, jnp.asarray(MASK)))


def test_trap_11_with_equal_policies_no_clip_acts():
    """Fails if one update on a batch depends on the ends; the second does."""

    def gradient(old, **ends):
        loss = by(rl.clip_loss, **ends)
        return jax.grad(lambda x: total(loss(x, old)))(jnp.asarray(NEW))

    narrow, wide = {"low": 0.01, "high": 0.01}, {"low": 0.9, "high": 9.0}
    same = gradient(NEW, **narrow), gradient(NEW, **wide)
    np.testing.assert_array_equal(*same)
    assert (gradient(OLD, **narrow) != gradient(OLD, **wide)).any()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"low": 1.5}, "low=1.5 is not in [0, 1]; use 0.2"),
        ({"low": -0.1}, "low=-0.1 is not in [0, 1]; use 0.2"),
        ({"high": -0.5}, "high=-0.5 is below 0; use 0.2, or 0.28"),
        (
            {"low": 2.0, "high": -1.0},
            "low=2.0 is not in [0, 1]; use 0.2\nhigh=-1.0 is below 0; use 0.2, or 0.28",
        ),
    ],
)
def test_ends_out_of_range_are_refused(settings, text):
    ones, mask = jnp.ones((1, 1)), jnp.ones((1, 1), bool)
    for loss in (rl.clip_loss, rl.dual_clip_loss):
        with config_error(text):
            loss(ones, ones, mask, **settings)


def test_other_settings_out_of_range_are_refused():
    ones, mask = jnp.ones((1, 1)), jnp.ones((1, 1), bool)
    with config_error("bound=1.0 is not above 1; use 3.0"):
        rl.dual_clip_loss(ones, ones, mask, bound=1.0)
    with config_error("bound=0.0 is not a number above 0; use a positive number"):
        rl.cispo_loss(ones, ones, ones, mask, bound=0.0)
    with config_error(
        "positive=0.0 is not a number above 0; use a positive number\n"
        "negative=-1.0 is not a number above 0; use a positive number"
    ):
        rl.sapo_loss(ones, ones, mask, positive=0.0, negative=-1.0)
