"""Log-probabilities of targets in chunks, against the softmax of all logits at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zjax.ops.target_logprobs import target_logprobs

RNG = np.random.default_rng(0)
ROWS, LENGTH, WIDTH, VOCAB = 4, 5, 6, 11
HIDDEN = RNG.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
HEAD = RNG.normal(size=(VOCAB, WIDTH)).astype(np.float32)
TARGETS = RNG.integers(0, VOCAB, size=(ROWS, LENGTH)).astype(np.int32)
TARGETS[0, 2] = TARGETS[3, 4] = -100
TOWARDS = RNG.normal(size=(2, ROWS, LENGTH)).astype(np.float32)
TEMPERATURE = 0.7


def plain(hidden, head, cap=0.0):
    """The definition, without chunks and without own derivatives."""
    logits = hidden @ head.T
    if cap:
        logits = cap * jnp.tanh(logits / cap)
    logprobs = jax.nn.log_softmax(logits / TEMPERATURE)
    entropies = -(jnp.exp(logprobs) * logprobs).sum(-1)
    targets = np.where(TARGETS == -100, 0, TARGETS)
    chosen = jnp.take_along_axis(logprobs, targets[..., None], -1)[..., 0]
    return tuple(jnp.where(TARGETS == -100, 0, x) for x in (chosen, entropies))


def values_and_gradients(function):
    """Both results, and gradients of a mix of both."""

    def total(hidden, head):
        results = function(hidden, head)
        return sum((x * y).sum() for x, y in zip(results, TOWARDS, strict=True)), tuple(
            results
        )

    return jax.jit(jax.grad(total, (0, 1), has_aux=True))(HIDDEN, HEAD)


@pytest.mark.parametrize(
    ("chunk_tokens", "num_batch_shards", "num_length_shards", "cap"),
    [
        pytest.param(0, 1, 1, 0.0, id="whole"),
        pytest.param(7, 1, 1, 2.0, id="chunk-divides-nothing, soft cap"),
        pytest.param(3, 2, 5, 0.0, id="shards of rows and lengths"),
    ],
)
def test_values_and_gradients_equal_the_definition(
    chunk_tokens, num_batch_shards, num_length_shards, cap
):
    chunked = functools.partial(
        target_logprobs,
        targets=jnp.asarray(TARGETS),
        temperature=TEMPERATURE,
        cap=cap,
        chunk_tokens=chunk_tokens,
        num_batch_shards=num_batch_shards,
        num_length_shards=num_length_shards,
    )
    found = values_and_gradients(chunked)
    expected = values_and_gradients(functools.partial(plain, cap=cap))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5),
        found,
        expected,
    )


def test_no_array_has_the_size_of_tokens_times_vocabulary():
    """Fails if chunks do nothing: forward, backward or between the two."""

    def total(hidden, head):
        targets = jnp.asarray(TARGETS)
        return target_logprobs(hidden, head, targets, chunk_tokens=4).logprobs.sum()

    text = str(jax.make_jaxpr(jax.grad(total, (0, 1)))(HIDDEN, HEAD))
    assert f"f32[1,4,1,{VOCAB}]" in text
    assert f",5,{VOCAB}]" not in text


def test_targets_that_are_no_ids_are_nan():
    targets = jnp.where(TARGETS == -100, VOCAB, TARGETS)
    found = target_logprobs(jnp.asarray(HIDDEN), jnp.asarray(HEAD), targets)
    bad = np.isnan(found.logprobs)
    np.testing.assert_array_equal(bad, TARGETS == -100)


def test_products_are_summed_in_float32():
    """Fails if logits of bfloat16 were rounded: the gap to float32 would be 1e-2."""
    hidden, head = (jnp.asarray(x, jnp.bfloat16) for x in (HIDDEN, HEAD))
    targets = jnp.asarray(TARGETS)
    found = target_logprobs(hidden, head, targets)
    exact = target_logprobs(*(x.astype(jnp.float32) for x in (hidden, head)), targets)
    np.testing.assert_allclose(found.logprobs, exact.logprobs, atol=1e-5)
    assert found.logprobs.dtype == jnp.float32
