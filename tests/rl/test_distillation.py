import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.refusals import config_error
from tests.support.rl import assert_gradient
from zjax import rl

RNG = np.random.default_rng(0)
STUDENT, TEACHER = RNG.normal(size=(2, 2, 3, 5))
MASK = np.arange(3) < np.array([3, 1])[:, None]


def softmax(logits, temperature):
    powers = np.exp(logits / temperature)
    return powers / powers.sum(-1, keepdims=True)


def kl(p, q):
    return (p * np.log(p / q)).sum(-1)


def mixed(beta):
    def divergence(p, q):
        m = beta * p + (1 - beta) * q
        return beta * kl(p, m) + (1 - beta) * kl(q, m)

    return divergence


LOSSES = {
    "reverse": (rl.reverse_kl, lambda p, q: kl(q, p)),
    "forward": (rl.forward_kl, kl),
    "mixed": (rl.jensen_shannon, mixed(0.5)),
    "mixed_0.1": (functools.partial(rl.jensen_shannon, beta=0.1), mixed(0.1)),
}
both = pytest.mark.parametrize(("loss", "reference"), LOSSES.values(), ids=LOSSES)
each = pytest.mark.parametrize("loss", [x for x, _ in LOSSES.values()], ids=LOSSES)
TEMPERATURE = pytest.mark.parametrize("temperature", [1.0, 0.6])


def values(loss, student, teacher=TEACHER, **arguments):
    arrays = jnp.asarray(student), jnp.asarray(teacher), jnp.asarray(MASK)
    return jax.jit(functools.partial(loss, **arguments))(*arrays)


def total_of(loss, student, teacher):
    return values(loss, student, teacher).sum()


@both
@TEMPERATURE
def test_divergences_equal_the_formula(loss, reference, temperature):
    with jax.enable_x64(True):
        found = values(loss, STUDENT, temperature=temperature)
    p, q = (softmax(x, temperature) for x in (TEACHER, STUDENT))
    expected = np.where(MASK, reference(p, q), 0)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@each
@TEMPERATURE
def test_gradients_equal_finite_differences(loss, temperature):
    weights = RNG.normal(size=MASK.shape)

    def total(x):
        found = values(loss, x, temperature=temperature)
        return (found * jnp.asarray(weights)).sum()

    found = assert_gradient(total, STUDENT)
    assert np.abs(found[MASK]).min() > 0
    assert not found[~MASK].any()


@each
def test_teachers_get_no_gradient_and_equal_students_no_loss(loss):
    teacher = jnp.asarray(TEACHER)
    total = functools.partial(total_of, loss)
    gradient = jax.jit(jax.grad(total, argnums=1))(jnp.asarray(STUDENT), teacher)
    assert not np.asarray(gradient).any()
    found, gradient = jax.jit(jax.value_and_grad(total))(teacher, teacher)
    np.testing.assert_allclose(found, 0.0, atol=1e-6)
    np.testing.assert_allclose(gradient, 0.0, atol=1e-6)


@each
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_trap_5_tokens_outside_the_mask_reach_nothing(loss, value):
    def spoiled(x):
        return jnp.asarray(np.where(MASK[..., None], x, value))

    total = functools.partial(total_of, loss)
    both = jax.jit(jax.value_and_grad(total))
    found = both(spoiled(STUDENT), spoiled(TEACHER))
    clean = both(jnp.asarray(STUDENT), jnp.asarray(TEACHER))
    jax.tree.map(np.testing.assert_array_equal, found, clean)


@each
def test_no_array_of_the_vocabulary_is_stored(loss):
    """Fails if residuals of the backward pass are more than the logits as given."""
    student, teacher = jnp.zeros((2, 2, 3, 50), jnp.bfloat16)
    mask = jnp.ones((2, 3), bool)
    found, backward = jax.vjp(lambda x: loss(x, teacher, mask), student)
    assert found.dtype == jnp.float32
    stored = [x for x in jax.tree.leaves(backward) if x.size >= student.size]
    assert [(x.shape, x.dtype) for x in stored] == [(student.shape, student.dtype)] * 2
    assert backward(found)[0].dtype == jnp.bfloat16


def test_trap_9_bfloat16_logits_have_a_softmax_of_float32():
    student, teacher = (jnp.asarray(x, jnp.bfloat16) for x in (STUDENT, TEACHER))
    p, q = (softmax(np.asarray(x, np.float64), 1.0) for x in (teacher, student))
    found = values(rl.reverse_kl, student, teacher)
    np.testing.assert_allclose(found, np.where(MASK, kl(q, p), 0), rtol=1e-5)


@each
@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_extreme_logits_are_finite(loss, scale):
    student, teacher = jnp.array([[scale, 0.0, -1.0]]), jnp.array([[-scale, 1.0, 0.0]])
    mask = jnp.array([True])
    both = jax.jit(jax.value_and_grad(lambda x: loss(x, teacher, mask)[0]))
    found, gradient = both(student)
    assert found > 0
    assert np.isfinite(found)
    assert np.isfinite(gradient).all()


def test_mixed_divergence_is_bounded():
    far = jnp.array([[1e4, 0.0]]), jnp.array([[0.0, 1e4]]), jnp.array([True])
    losses = rl.jensen_shannon, rl.reverse_kl, rl.forward_kl
    mixed, reverse, forward = (jax.jit(loss)(*far) for loss in losses)
    np.testing.assert_allclose(mixed, np.log(2), rtol=1e-6)
    assert reverse == forward == 2e4 / 2


@each
def test_tokens_that_both_exclude_count_nothing(loss):
    """Filters of a sampler set logits to -inf, in both models."""

    def excluded(x):
        tail = np.full((*MASK.shape, 1), -np.inf)
        return jnp.asarray(np.concatenate([x, tail], 2), jnp.float32)

    both = jax.jit(jax.value_and_grad(functools.partial(total_of, loss)))
    found = both(excluded(STUDENT), excluded(TEACHER))
    narrow = jnp.asarray(STUDENT, jnp.float32), jnp.asarray(TEACHER, jnp.float32)
    value, gradient = both(*narrow)
    np.testing.assert_allclose(found[0], value, rtol=1e-6)
    wide = np.asarray(found[1])
    np.testing.assert_allclose(wide[..., :-1], gradient, rtol=1e-5, atol=1e-7)
    assert not wide[..., -1].any()


@pytest.mark.parametrize(
    ("beta", "end"), [(1e-6, rl.forward_kl), (1 - 1e-6, rl.reverse_kl)]
)
def test_mixtures_tend_to_the_divergences(beta, end):
    with jax.enable_x64(True):
        found = values(functools.partial(rl.jensen_shannon, beta=beta), STUDENT)
        expected = min(beta, 1 - beta) * np.asarray(values(end, STUDENT))
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize("beta", [0.0, 1.0, float("nan")])
def test_mixtures_are_between_the_ends(beta):
    text = f"beta={beta} is not between 0 and 1; use forward_kl for 0, and reverse_kl"
    with config_error(f"{text} for 1"):
        values(functools.partial(rl.jensen_shannon, beta=beta), STUDENT)


@each
def test_temperature_is_above_zero(loss):
    with config_error("temperature=0.0 is not a number above 0; use a positive number"):
        values(loss, STUDENT, temperature=0.0)
