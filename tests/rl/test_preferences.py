import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.refusals import config_error
from tests.support.rl import GOLDEN, MASK, NEW, REF, assert_gradient, spoiled
from zjax import rl

WITH_REFERENCE = {
    "dpo_sigmoid": rl.dpo_loss,
    "dpo_label_smoothing_0.1": functools.partial(rl.dpo_loss, label_smoothing=0.1),
    "robust_0.1": functools.partial(rl.robust_dpo_loss, label_smoothing=0.1),
    "hinge": rl.hinge_loss,
    "ipo_token_normalised": rl.ipo_loss,
    "apo_zero": rl.apo_zero_loss,
}
WITHOUT_REFERENCE = {
    "simpo_beta2_gamma1": functools.partial(rl.simpo_loss, beta=2.0, gamma=1.0),
    "orpo_ratio_term": rl.odds_ratio_loss,
}
LOSSES = WITH_REFERENCE | {
    name: lambda policy, _, loss=loss: loss(policy)
    for name, loss in (WITHOUT_REFERENCE | {"orpo": rl.orpo_loss}).items()
}
each = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
golden = pytest.mark.parametrize("name", WITH_REFERENCE | WITHOUT_REFERENCE)


def pairs_of(logprobs, mask=MASK):
    """Pairs of adjacent rows, the chosen completion first."""
    found = rl.sequence_logprobs(jnp.asarray(logprobs), jnp.asarray(mask))
    return rl.Pairs(*(jax.tree.map(lambda x, k=k: x[k::2], found) for k in (0, 1)))


def mean_of(loss, logprobs, reference=REF, mask=MASK):
    policy = pairs_of(logprobs, mask)
    losses = loss(policy, pairs_of(reference, mask))
    return rl.example_mean(losses, policy.is_real)


def pairs_at(chosen, rejected, num_tokens=1):
    """One pair of given sums."""
    n = jnp.array([num_tokens])
    return rl.Pairs(
        *(rl.SequenceLogprobs(jnp.array([x]), n) for x in (chosen, rejected))
    )


@golden
def test_means_equal_the_golden_values(name):
    with jax.enable_x64(True):
        found = mean_of(LOSSES[name], NEW).mean
    np.testing.assert_allclose(found, GOLDEN["preference"][name], rtol=1e-12)


@golden
def test_means_in_float32_are_close(name):
    found = mean_of(LOSSES[name], NEW.astype(np.float32), REF.astype(np.float32)).mean
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, GOLDEN["preference"][name], rtol=1e-6)


def test_orpo_adds_the_supervised_loss():
    with jax.enable_x64(True):
        loss = functools.partial(rl.orpo_loss, weight=0.3)
        found = mean_of(lambda policy, _: loss(policy), NEW).mean
    supervised = -np.mean([NEW[row][MASK[row]].mean() for row in (0, 2, 4)])
    expected = supervised + 0.3 * GOLDEN["preference"]["orpo_ratio_term"]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@each
def test_gradients_equal_finite_differences(loss):
    found = assert_gradient(lambda x: mean_of(loss, x).mean, NEW)
    assert not found[~MASK].any()


def test_chosen_completions_gain_and_rejected_lose():
    """Fails if the sign of a loss or the order of a pair is wrong."""
    for loss in LOSSES.values():
        slope = jax.jit(jax.grad(lambda x, loss=loss: mean_of(loss, x).mean))
        gradient = np.asarray(slope(jnp.array(NEW)))
        assert (gradient[0::2].sum(1) <= 0).all()
        assert gradient[0::2].min() < 0 < gradient[1::2].max()


@each
def test_reference_models_get_no_gradient(loss):
    slope = jax.jit(jax.grad(lambda x: mean_of(loss, NEW, x).mean))
    assert not np.asarray(slope(jnp.asarray(REF))).any()


@pytest.mark.parametrize("name", WITH_REFERENCE)
def test_reference_models_change_the_loss(name):
    loss = WITH_REFERENCE[name]
    assert mean_of(loss, NEW).mean != mean_of(loss, NEW, REF + 0.1 * NEW).mean


@each
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_trap_5_tokens_outside_the_mask_reach_nothing(loss, value):
    @jax.jit
    @jax.value_and_grad
    def of(x, reference):
        return mean_of(loss, x, reference).mean

    found = of(spoiled(NEW, value), spoiled(REF, value))
    clean = of(NEW, REF)
    jax.tree.map(np.testing.assert_array_equal, found, clean)


@each
@pytest.mark.parametrize("num_microbatches", [2, 4])
def test_trap_1_no_split_changes_loss_or_gradient(loss, num_microbatches):
    """Fails if a microbatch divides by a count of its own, or counts padding."""
    rows = np.arange(16) % 6
    mask = MASK[rows]
    mask[12:] = False  # microbatches of unequal numbers of pairs

    def sums(x, rows, mask):
        return mean_of(loss, x, REF[rows], mask)

    def split(x):
        parts = (np.split(a, num_microbatches) for a in (rows, mask))
        pieces = jnp.split(x, num_microbatches)
        found = [sums(*part) for part in zip(pieces, *parts, strict=True)]
        return sum(x.loss_sum for x in found) / sum(x.weight for x in found)

    with jax.enable_x64(True):
        found = jax.jit(jax.value_and_grad(split))(jnp.asarray(NEW[rows]))
        whole = jax.jit(jax.value_and_grad(lambda x: sums(x, rows, mask).mean))
        expected = whole(jnp.asarray(NEW[rows]))
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-15)


@each
def test_padding_pairs_reach_nothing(loss):
    """Stored log-probabilities of a pair without tokens may be anything."""
    clean = pairs_of(NEW), pairs_of(REF)

    def padded(pairs):
        def pad(x, value):
            return jnp.append(x, jnp.asarray(value, x.dtype))

        return rl.Pairs(
            *(
                rl.SequenceLogprobs(pad(x.sums, np.nan), pad(x.num_tokens, 0))
                for x in pairs
            )
        )

    def value(policy, reference):
        return rl.example_mean(loss(policy, reference), policy.is_real).mean

    gradient = jax.grad(value, allow_int=True)
    assert value(*map(padded, clean)) == value(*clean)
    assert loss(*map(padded, clean))[-1] == 0
    found, expected = gradient(*map(padded, clean)), gradient(*clean)
    for side, want in zip(found, expected, strict=True):
        np.testing.assert_array_equal(side.sums, np.append(want.sums, 0.0))


@each
@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_half_a_pair_reaches_nothing(loss, side):
    """A completion without tokens is compared with nothing."""
    empty = rl.SequenceLogprobs(jnp.array([-9.0]), jnp.array([0]))
    reference = pairs_at(-1.0, -1.0)

    def value(chosen, rejected):
        policy = pairs_at(chosen, rejected)._replace(**{side: empty})
        return loss(policy, reference)[0]

    found = jax.value_and_grad(value, argnums=(0, 1))(-2.0, -3.0)
    assert jax.tree.leaves(found) == [0, 0, 0]


@each
@pytest.mark.parametrize("margin", [1e4, -1e4])
def test_extreme_margins_are_finite(loss, margin):
    """Fails if a sigmoid, an odds or a square over- or underflows."""
    reference = pairs_at(-1.0, -1.0)

    def value(chosen, rejected):
        return loss(pairs_at(chosen, rejected), reference)[0]

    ends = (-1e-30, -abs(margin)) if margin > 0 else (-abs(margin), -1e-30)
    found, gradients = jax.value_and_grad(value, argnums=(0, 1))(*ends)
    assert np.isfinite([found, *gradients]).all()


@each
@pytest.mark.parametrize("chosen", [0.0, -1e-9])
def test_certain_completions_are_finite(loss, chosen):
    """The odds of a probability of 1 are infinite."""

    def value(chosen, rejected):
        return loss(pairs_at(chosen, rejected), pairs_at(-1.0, -1.0))[0]

    for ends in ((chosen, -2.0), (-2.0, chosen)):
        found, gradients = jax.value_and_grad(value, argnums=(0, 1))(*ends)
        assert np.isfinite([found, *gradients]).all()


@pytest.mark.parametrize("mean", [-1e-6, -1e-3, -0.5, -0.6931, -0.75, -3.0, -50.0])
def test_odds_keep_their_digits(mean):
    even = float(np.float32(-0.25))

    def log_odds(m):
        return m - np.log(-np.expm1(m))

    found = rl.odds_ratio_loss(pairs_at(mean, even))[0]
    gap = log_odds(float(np.float32(mean))) - log_odds(even)
    np.testing.assert_allclose(found, np.logaddexp(0, -gap), rtol=2e-6)


def test_ipo_and_simpo_take_means_and_dpo_sums():
    """Fails if a loss depends on length where the paper's does not, or the reverse."""
    one, four = pairs_at(-1.0, -3.0), pairs_at(-4.0, -12.0, 4)
    even = pairs_at(-1.0, -1.0)
    assert rl.ipo_loss(one, even) == rl.ipo_loss(four, even)
    assert rl.simpo_loss(one) == rl.simpo_loss(four)
    assert rl.orpo_loss(one) == rl.orpo_loss(four)
    assert rl.dpo_loss(one, even) > rl.dpo_loss(four, even)


def test_label_smoothing_keeps_margins_bounded():
    """The loss rises again beyond the margin at which the labels' share is met."""
    even = pairs_at(-1.0, -1.0)
    losses = {
        x: rl.dpo_loss(pairs_at(-1.0, x), even, beta=1.0, label_smoothing=0.2)[0]
        for x in (-1.0, -2.4, -9.0)
    }
    assert losses[-2.4] < losses[-1.0] < losses[-9.0]


def test_robust_loss_is_unbiased_under_wrong_labels():
    right, wrong = pairs_at(-1.0, -3.0), pairs_at(-3.0, -1.0)
    even = pairs_at(-1.0, -1.0)
    noisy = [
        rl.robust_dpo_loss(x, even, beta=1.0, label_smoothing=0.3)[0]
        for x in (right, wrong)
    ]
    found = 0.7 * noisy[0] + 0.3 * noisy[1]
    np.testing.assert_allclose(found, rl.dpo_loss(right, even, beta=1.0)[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("loss", "arguments", "text"),
    [
        pytest.param(
            rl.dpo_loss,
            {"label_smoothing": 0.5},
            "label_smoothing=0.5 is not 0 or more and below 0.5; "
            "use the share of pairs whose preference is wrong",
            id="smoothing",
        ),
        pytest.param(
            rl.robust_dpo_loss,
            {"label_smoothing": -0.1},
            "label_smoothing=-0.1 is not 0 or more and below 0.5; "
            "use the share of pairs whose preference is wrong",
            id="robust",
        ),
        *(
            pytest.param(
                loss,
                {"beta": 0.0},
                "beta=0.0 is not a number above 0; use a positive number",
                id=loss.__name__,
            )
            for loss in (rl.dpo_loss, rl.hinge_loss, rl.ipo_loss, rl.apo_zero_loss)
        ),
    ],
)
def test_values_out_of_range_are_refused(loss, arguments, text):
    with config_error(text):
        loss(pairs_of(NEW), pairs_of(REF), **arguments)


@pytest.mark.parametrize(
    ("loss", "arguments", "text"),
    [
        pytest.param(
            rl.simpo_loss,
            {"gamma": -1.0},
            "gamma=-1.0 is not a number of 0 or more; use 0 or a positive number",
            id="gamma",
        ),
        pytest.param(
            rl.simpo_loss,
            {"beta": float("nan")},
            "beta=nan is not a number above 0; use a positive number",
            id="beta",
        ),
        pytest.param(
            rl.orpo_loss,
            {"weight": -0.1},
            "weight=-0.1 is not a number of 0 or more; use 0 or a positive number",
            id="weight",
        ),
    ],
)
def test_values_of_losses_without_reference_are_refused(loss, arguments, text):
    with config_error(text):
        loss(pairs_of(NEW), **arguments)
