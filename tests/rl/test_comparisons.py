"""Objectives on packed rows: golden values, padding, and places in a row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.rl import GOLDEN, INPUTS, MASK, NEW, REF, spoiled
from zjax.rl import comparisons
from zjax.settings import preference as settings

OBJECTIVES = {
    "dpo_sigmoid": settings.Dpo(),
    "dpo_label_smoothing_0.1": settings.Dpo(label_smoothing=0.1),
    "robust_0.1": settings.Dpo(label_smoothing=0.1, robust=True),
    "hinge": settings.Hinge(),
    "ipo_token_normalised": settings.Ipo(),
    "apo_zero": settings.ApoZero(),
    "simpo_beta2_gamma1": settings.Simpo(),
}
EXAMPLES = np.array([[[2, 1], [3, 4]], [[1, 2], [0, 0]]], np.int32)
"""Segments of the pairs (0, 1), (2, 3) and (4, 5). In the row of the first, the
rejected completion comes first."""
ORDER = np.array([[1, 0, 2, 3], [4, 5, -1, -1]])
"""Rows of the golden tensors, in the order of segments."""


def packed(values, fill=0):
    """Packs the six golden sequences into two rows of four segments."""
    found = np.full((2, 4, 5), fill, np.result_type(values))
    found[ORDER >= 0] = np.asarray(values)[ORDER[ORDER >= 0]]
    return found.reshape(2, 20)


def batch_of(**arrays):
    segments = np.broadcast_to(np.arange(1, 5)[:, None], (4, 5)).reshape(-1)
    segments = np.where(packed(np.ones((6, 5))) > 0, segments, 0)
    given = {
        "segment_ids": segments.astype(np.int32),
        "weights": packed(MASK.astype(np.float32)),
        "examples": EXAMPLES,
    }
    return jax.tree.map(jnp.asarray, given | arrays)


def sums_of(objective, values, fill=0, compute=comparisons.comparison_sums, **arrays):
    """Computes in float64, on the golden sequences packed with a fill elsewhere."""
    with jax.enable_x64(True):
        compiled = jax.jit(functools.partial(compute, objective))
        found = compiled(jnp.asarray(packed(values, fill)), batch_of(**arrays))
        return jax.tree.map(np.asarray, found)


def reference():
    sums = (REF * MASK).sum(1)
    return np.array(
        [[[sums[0], sums[1]], [sums[2], sums[3]]], [[sums[4], sums[5]]] * 2]
    )


@pytest.mark.parametrize("name", OBJECTIVES)
def test_means_equal_the_golden_values(name):
    """Fails if tokens of prompts, padding or other segments count."""
    given = {"reference_logprobs": reference()}
    found = sums_of(OBJECTIVES[name], spoiled(NEW), np.nan, **given)
    expected = GOLDEN["preference"][name]
    np.testing.assert_allclose(found.loss_sum / found.weight, expected, rtol=1e-12)
    assert found.weight == 3


def test_orpo_adds_the_supervised_loss_of_the_chosen():
    found = sums_of(settings.Orpo(weight=0.3), NEW)
    supervised = -np.mean([NEW[row][MASK[row]].mean() for row in (0, 2, 4)])
    expected = supervised + 0.3 * GOLDEN["preference"]["orpo_ratio_term"]
    np.testing.assert_allclose(found.loss_sum / found.weight, expected, rtol=1e-12)


def test_rewards_are_those_that_dpo_implies():
    found = sums_of(settings.Dpo(beta=0.5), NEW, reference_logprobs=reference())
    rewards = 0.5 * ((NEW - REF) * MASK).sum(1)
    gaps = rewards[0::2] - rewards[1::2]
    metrics = found.metrics
    np.testing.assert_allclose(metrics["chosen_reward"], rewards[0::2].sum())
    np.testing.assert_allclose(metrics["rejected_reward"], rewards[1::2].sum())
    np.testing.assert_allclose(metrics["margin"], gaps.sum())
    assert metrics["accuracy"] == (gaps > 0).sum()
    totals = (NEW * MASK).sum(1)
    np.testing.assert_allclose(metrics["chosen_logprob"], totals[0::2].sum())
    np.testing.assert_allclose(metrics["rejected_logprob"], totals[1::2].sum())


@pytest.mark.parametrize("divergence", [None, 0.4, -0.4])
def test_kto_reads_labels_and_a_given_divergence(divergence):
    """The second sequence of each pair estimates the divergence, and has no loss."""
    given = {} if divergence is None else {"divergence": np.float64(divergence)}
    desirable = np.array([[1, 0], [1, 0]], np.int32)
    given |= {"reference_logprobs": reference(), "desirable": desirable}
    found = sums_of(settings.Kto(beta=0.5, desirable_weight=1.5), NEW, **given)
    ratios = ((NEW - REF) * MASK).sum(1)
    np.testing.assert_allclose(found.metrics["divergence"], ratios[1::2].sum())
    ahead = 0.5 * (ratios[0::2] - max(divergence or 0, 0))
    sides = np.array([1, -1, 1])
    losses = np.array([1.5, 1, 1.5]) * (1 - 1 / (1 + np.exp(-sides * ahead)))
    np.testing.assert_allclose(found.loss_sum, losses.sum(), rtol=1e-12)
    np.testing.assert_allclose(found.metrics["margin"], (sides * ahead).sum())
    assert found.metrics["accuracy"] == (sides * ahead > 0).sum()
    assert found.weight == 3


def test_rewards_of_last_tokens_equal_the_golden_value():
    rewards = INPUTS["rewards"].reshape(-1)
    values = np.full((6, 5), np.nan)
    values[:, -1] = rewards
    compute = comparisons.reward_sums
    found = sums_of(settings.RewardModel(), values, np.nan, compute)
    expected = GOLDEN["preference"]["reward_model_bradley_terry"]
    np.testing.assert_allclose(found.loss_sum / found.weight, expected, rtol=1e-12)
    assert found.metrics["accuracy"] == (rewards[0::2] > rewards[1::2]).sum()
    np.testing.assert_allclose(found.metrics["reward"], rewards.sum() / 2)


def test_lists_of_any_length_weigh_as_one():
    """A list of three, a pair, and a place without an example."""
    batch = {
        "segment_ids": jnp.array([[1, 2, 3, 3, 0], [1, 2, 0, 0, 0]]),
        "examples": jnp.array([[[3, 1, 2], [0, 0, 0]], [[2, 1, 0], [0, 0, 0]]]),
    }
    rewards = jnp.array([[1.0, 2.0, 9.0, 3.0, 9.0], [0.5, 1.0, 9.0, 9.0, 9.0]])
    objective = settings.RewardModel(centering=0.1)
    found = jax.jit(functools.partial(comparisons.reward_sums, objective))(
        rewards, batch
    )
    pairs = [(3.0, 1.0), (3.0, 2.0), (1.0, 2.0)]
    losses = [np.logaddexp(0, b - a) + 0.1 * (a + b) ** 2 for a, b in pairs]
    last = np.logaddexp(0, -0.5) + 0.1 * 1.5**2
    np.testing.assert_allclose(found.loss_sum, np.mean(losses) + last, rtol=1e-6)
    assert found.weight == 2
    np.testing.assert_allclose(found.metrics["accuracy"], 2 / 3 + 1, rtol=1e-6)


def test_gradients_reach_completions_alone():
    batch = batch_of(reference_logprobs=reference().astype(np.float32))

    @jax.jit
    @jax.grad
    def gradient_of(logprobs):
        return comparisons.comparison_sums(settings.Dpo(), logprobs, batch).loss_sum

    gradient = gradient_of(jnp.asarray(packed(spoiled(NEW), np.nan), jnp.float32))
    np.testing.assert_array_equal(np.asarray(gradient) != 0, packed(MASK) > 0)
