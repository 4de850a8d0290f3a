"""Packed rows give the loss of one sequence a row; objectives out of range."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.rl import ADVANTAGES, MASK, NEW, OLD, REF, SAMPLER
from zjax import rl
from zjax.errors import ConfigError

ROWS, LENGTH = MASK.shape
CLIP = rl.Objective(rl.Clip(high=0.28), kl=rl.Kl(0.1, by_ratio=True), threshold=0.02)
OBJECTIVES = {
    "clip": CLIP,
    "dual clip": dataclasses.replace(CLIP, loss=rl.Clip(bound=1.5)),
    "sequences": rl.Objective(
        rl.Clip(0.03, 0.04), "sequences", correction=rl.Correction("sequences", "mask")
    ),
    "cispo": rl.Objective(rl.Cispo(1.1), kl=rl.Kl(0.1, "k2")),
    "sapo": rl.Objective(rl.Sapo(), correction=rl.Correction("tokens", "mask", 1.2)),
    "reinforce": rl.Objective(rl.Reinforce(), kl=rl.Kl(0.1, "k3"), entropy_weight=0.2),
}


def batch_of(mask, **arrays):
    """A batch with weights of 1 over a count of tokens."""
    return {
        "targets": jnp.where(mask, 3, -100),
        "weights": jnp.ones(mask.shape),
        "rl": {k: jnp.asarray(x, jnp.float32) for k, x in arrays.items()},
    }


ARRAYS = {
    "advantages": np.broadcast_to(ADVANTAGES, MASK.shape),
    "logprobs": SAMPLER,
    "old_logprobs": OLD,
    "reference_logprobs": REF,
}
ENTROPIES = np.random.default_rng(0).uniform(1, 2, MASK.shape).astype(np.float32)


def in_pairs(x):
    """Two sequences to a row."""
    return jnp.asarray(x).reshape(ROWS // 2, 2 * LENGTH)


def value(objective, batch):
    """Loss, its gradient, and metrics, of the golden log-probabilities."""
    logprobs = jnp.asarray(NEW, jnp.float32).reshape(batch["targets"].shape)
    entropies = jnp.asarray(ENTROPIES).reshape(batch["targets"].shape)

    def loss(logprobs):
        sums = rl.objective_sums(objective, logprobs, entropies, batch)
        return sums.loss_sum, sums

    gradient, sums = jax.jit(jax.grad(loss, has_aux=True))(logprobs)
    return sums, gradient.reshape(MASK.shape)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_packed_sequences_have_the_loss_of_rows(name):
    rows = batch_of(MASK, **ARRAYS)
    packed = jax.tree.map(in_pairs, rows)
    segments = np.repeat([[1, 2]], LENGTH, 1)
    packed["segment_ids"] = jnp.broadcast_to(segments, (ROWS // 2, 2 * LENGTH))
    found, expected = (value(OBJECTIVES[name], x) for x in (packed, rows))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_the_loss_is_the_composition_of_the_functions():
    """By hand, from the pure functions."""
    mask, arrays = jnp.asarray(MASK), {k: jnp.asarray(x) for k, x in ARRAYS.items()}
    new, old, ref, sampler = map(jnp.asarray, (NEW, OLD, REF, SAMPLER))
    sums, _ = value(CLIP, batch_of(MASK, **ARRAYS))
    ratios = rl.token_ratios(new, old, mask)
    losses = rl.clip_loss(ratios, arrays["advantages"], mask, low=0.2, high=0.28)
    kept = rl.on_policy_sequences(
        new, sampler, jnp.asarray(ADVANTAGES), mask, threshold=0.02
    )
    assert 0 < kept.sum() < len(kept)
    penalty = 0.1 * ratios * rl.kl_k3_k2(new, ref, mask)
    expected = rl.token_mean(losses * kept + penalty, mask)
    np.testing.assert_allclose(sums.loss_sum, expected.loss_sum, rtol=1e-5)
    assert float(sums.weight) == float(expected.weight) == MASK.sum()
    shown = {name: x / sums.weight for name, x in sums.metrics.items()}
    by_hand = {
        "entropy": ENTROPIES,
        "ratio": ratios,
        "kl": rl.kl_k3_k2(new, ref, mask),
        "clipped_low": (ratios < 0.8) & (arrays["advantages"] < 0),
        "clipped_high": (ratios > 1.28) & (arrays["advantages"] > 0),
        "dropped": jnp.broadcast_to(kept == 0, MASK.shape),
        "sampler_off": abs(jnp.exp(old - sampler) - 1) > 0.1,
        "sampler_kl": jnp.exp(old - sampler) - 1 - (old - sampler),
    }
    assert shown.keys() == by_hand.keys()
    for name, x in by_hand.items():
        expected = rl.token_mean(jnp.asarray(x, jnp.float32), mask).mean
        np.testing.assert_allclose(shown[name], expected, rtol=1e-4, atol=1e-7)


def test_a_divergence_without_reference_is_refused():
    arrays = {k: x for k, x in ARRAYS.items() if k != "reference_logprobs"}
    with pytest.raises(ConfigError) as error:
        value(CLIP, batch_of(MASK, **arrays))
    assert str(error.value) == (
        "rl.reference_logprobs=None is missing; give the log-probabilities of the "
        "reference"
    )


def test_numbers_out_of_range_are_told_at_once():
    with pytest.raises(ConfigError) as error:
        rl.Objective(
            rl.Clip(1.5, -0.1, 1.0),
            kl=rl.Kl(0.0),
            correction=rl.Correction(lowest=3.0),
            threshold=-1.0,
            entropy_weight=-1.0,
            temperature=0.0,
        )
    assert str(error.value).splitlines() == [
        "loss.low=1.5 is above 1, and ratios are never below 0; use 0.2",
        "correction.lowest=3.0 is above correction.bound=2.0; use 0.5 and 5.0",
        "temperature=0.0 is not a number above 0; use a number above 0",
        "threshold=-1.0 is not a number above 0; use a number above 0",
        "entropy_weight=-1.0 is not a number of 0 or more; use a number above 0",
        "loss.high=-0.1 is not a number of 0 or more; use a number above 0",
        "loss.bound=1.0 is not a number above 1; use a number above 1",
        "kl.weight=0.0 is not a number above 0; use a number above 0",
    ]
    with pytest.raises(ConfigError) as error:
        rl.Objective(rl.Sapo(0.0, -1.0))
    assert str(error.value).splitlines() == [
        "loss.positive=0.0 is not a number above 0; use a number above 0",
        "loss.negative=-1.0 is not a number above 0; use a number above 0",
    ]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"ratios": "sequences", "correction": rl.Correction("tokens")},
            "correction='tokens' weighs another unit than the ratio='sequences' of the "
            "loss; use 'sequences'",
        ),
        (
            {"loss": rl.Cispo(), "correction": rl.Correction("sequences")},
            "correction='sequences' weighs another unit than the ratio='tokens' of the "
            "loss; use 'tokens'",
        ),
        (
            {"loss": rl.Sapo(), "ratios": "sequences"},
            "ratios='sequences' has no meaning for the loss Sapo, whose unit is the "
            "token; use Clip, or ratios='tokens'",
        ),
    ],
)
def test_trap_6_units_that_do_not_fit_are_refused(settings, text):
    with pytest.raises(ConfigError) as error:
        rl.Objective(**settings)
    assert str(error.value) == text
