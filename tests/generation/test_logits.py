"""Transformations of logits against sorts and loops of NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.reference import filters as reference
from zjax.generation import logits as transforms
from zjax_kernels.decode.filters import exact_sum

RNG = np.random.default_rng(0)
INF = np.inf
LN2 = np.log(2)
ROWS = {
    "ties": [1, 1, 1, 1, 1, 1, 1, 1],
    "ties-at-the-top": [0, 5, 5, -1, 2, 2, 5, 0],
    "one-left": [-INF, -INF, 3, -INF, -INF, -INF, -INF, -INF],
    "some-forbidden": [-INF, 0, 1, -INF, 1, 0.5, -INF, -3],
    "halves": [-LN2 * n for n in range(1, 8)] + [-7 * LN2],
    "neighbours": [
        1,
        np.nextafter(np.float32(1), np.float32(2)),
        0,
        -0.0,
        1,
        0,
        -1,
        -1,
    ],
    "far-apart": [3e38, -3e38, 1e-30, -1e-30, 0, 88, -88, 200],
    "tiny": [1e-7, 2e-7, -1e-7, 0, 3e-7, 4e-7, -5e-7, 1e-7],
}
ADVERSARIAL = np.array([*ROWS.values()], np.float32)
RANDOM = (3 * RNG.normal(size=(40, 97))).astype(np.float32)
ROUNDED = np.round(RANDOM)  # many ties
LARGE = RNG.normal(size=(3, 6000)).astype(np.float32)


def check(transform, oracle, logits, settings, dtype):
    settings = np.resize(np.array(settings, dtype), len(logits))
    found = np.asarray(jax.jit(transform)(logits, settings))
    for row, setting, result in zip(logits, settings, found, strict=True):
        kept = oracle(row, setting) & (row > -INF)
        np.testing.assert_array_equal(result, np.where(kept, row, -INF))


@pytest.mark.parametrize("k", [0, 1, 2, 3, 7, 8])
def test_top_k_of_adversarial_rows(k):
    check(transforms.keep_top_k, reference.kept_by_top_k, ADVERSARIAL, [k], np.int32)


@pytest.mark.parametrize("logits", [RANDOM, ROUNDED], ids=["random", "ties"])
def test_top_k_of_random_rows(logits):
    settings = [0, 1, 2, 5, 50, 96, 97]
    check(transforms.keep_top_k, reference.kept_by_top_k, logits, settings, np.int32)


@pytest.mark.parametrize("p", [1e-30, 0.01, 0.4999, 0.5001, 0.7499, 0.7501, 0.999, 1])
def test_top_p_of_adversarial_rows(p):
    rows = ADVERSARIAL
    check(transforms.keep_top_p, reference.kept_by_top_p, rows, [p], np.float32)


@pytest.mark.parametrize(
    "logits", [RANDOM, ROUNDED, LARGE], ids=["random", "ties", "large"]
)
def test_top_p_of_random_rows(logits):
    settings = [1, 0.9, 0.31, 1e-6, 0.99, 0.05, 0.777]
    check(transforms.keep_top_p, reference.kept_by_top_p, logits, settings, np.float32)


def test_a_top_p_that_devices_take_for_zero_keeps_the_likeliest():
    """Fails if no token is left, and the first is drawn."""
    settings = jnp.array([1e-40, 1e-46, 1e-38], jnp.float32)
    kept = jax.jit(transforms.keep_top_p)(RANDOM[:3], settings)
    is_likeliest = RANDOM[:3] == RANDOM[:3].max(axis=1, keepdims=True)
    np.testing.assert_array_equal(np.isfinite(kept), is_likeliest)


@pytest.mark.parametrize(
    "logits", [ADVERSARIAL[:5], RANDOM, ROUNDED], ids=["few", "random", "ties"]
)
def test_min_p(logits):
    settings = [0, 0.1, 1, 0.03, 0.6]
    check(transforms.keep_min_p, reference.kept_by_min_p, logits, settings, np.float32)


def test_sums_are_equal_in_every_order():
    """Fails with a sum of floats, which depends on how a program adds."""
    weights = RNG.uniform(size=(1, 30_000)).astype(np.float32)
    weights[0, ::7] *= 1e-6
    sums = {
        float(exact_sum(jnp.asarray(RNG.permuted(weights, axis=1)))[0])
        for _ in range(8)
    }
    assert len(sums) == 1
    np.testing.assert_allclose(sums.pop(), weights.astype(np.float64).sum(), rtol=3e-7)


def test_scale_keeps_the_softmax_of_quotients():
    temperatures = jnp.array([0.1, 1, 2.5])
    found = jax.nn.softmax(transforms.scale(jnp.array(RANDOM[:3]), temperatures), 1)
    for row, temperature, result in zip(RANDOM, temperatures, found, strict=False):
        expected = reference.softmax(row.astype(np.float64) / float(temperature))
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-30)


def test_a_low_temperature_tells_large_logits_apart():
    logits = jnp.array([[100.0, 100.00001, 0.0]])
    scores = transforms.scale(logits, jnp.array([1e-5]))
    assert float(scores[0, 0]) == pytest.approx(-0.76, abs=0.01)
    assert float(scores[0, 1]) == 0


def test_counts_are_of_the_columns_between():
    history = RNG.integers(0, 11, size=(4, 9)).astype(np.int32)
    history[:, 8] = -1  # not read
    firsts, ends = jnp.array([0, 2, 5, 3]), jnp.array([8, 6, 5, 4])
    found = transforms.count_tokens(jnp.array(history), firsts, ends, 11)
    for row, first, end, counts in zip(history, firsts, ends, found, strict=True):
        expected = [row[first:end].tolist().count(token) for token in range(11)]
        assert counts.tolist() == expected


def test_penalties_equal_loops():
    logits, history = RANDOM[:3, :11], RNG.integers(0, 11, size=(3, 6)).astype(np.int32)
    zeros, ends = jnp.zeros(3, jnp.int32), jnp.full(3, 6)
    counts = transforms.count_tokens(jnp.array(history), zeros, ends, 11)
    repetition = jnp.array([1, 1.5, 0.7])
    presence = jnp.array([0.5, 0, -1])
    frequency = jnp.array([0, 0.3, 0.25])
    first = transforms.penalise_repetition(jnp.array(logits), counts, repetition)
    second = transforms.penalise_counts(jnp.array(logits), counts, presence, frequency)
    for row in range(3):
        written = history[row].tolist()
        wanted = reference.penalise(
            logits[row], [], written, repetition=repetition[row]
        )
        np.testing.assert_allclose(first[row], wanted, rtol=1e-6)
        penalties = {"presence": presence[row], "frequency": frequency[row]}
        wanted = reference.penalise(logits[row], [], written, **penalties)
        np.testing.assert_allclose(second[row], wanted, rtol=1e-6, atol=1e-6)


def test_forbidden_ids_of_a_row_are_forbidden_there_alone():
    logits = jnp.zeros((3, 5))
    ids = jnp.array([[0, -1, 4], [-1, -1, -1], [2, 2, -1]])
    found = transforms.forbid(logits, ids)
    assert [np.flatnonzero(row == -INF).tolist() for row in found] == [[0, 4], [], [2]]
