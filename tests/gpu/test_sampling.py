"""Tokens and log-probabilities of a large vocabulary on the GPU, against NumPy."""

import jax
import numpy as np
import pytest

from tests.support.gpu import NEEDS_HOPPER
from zjax.generation import programs
from zjax.generation.sampling import Sampling, choose_tokens, rows_of

pytestmark = NEEDS_HOPPER
NUM_ROWS, VOCAB, TEMPERATURE = 264, 151_936, 0.25
"""Rows of a pass with chunks, and the vocabulary of Qwen2.5."""


@pytest.mark.parametrize("is_filtered", [False, True])
@pytest.mark.parametrize("num_greedy", [0, 7])
def test_log_probabilities_are_those_of_the_distribution(is_filtered, num_greedy):
    """Fails if scores are lost between the branches of a program."""
    drawn = Sampling(
        temperature=TEMPERATURE, num_logprobs=0, filtered_logprobs=is_filtered
    )
    greedy = Sampling(num_logprobs=0)
    chosen = [greedy] * num_greedy + [drawn] * (NUM_ROWS - num_greedy)
    rows = rows_of(chosen, [17 * number for number in range(NUM_ROWS)])
    logits = np.random.default_rng(0).normal(size=(NUM_ROWS, VOCAB)).astype(np.float32)
    zeros = np.zeros(NUM_ROWS, np.int32)
    # As in a pass: branches are parts of graphs, which others need not be.
    choose = jax.jit(choose_tokens, compiler_options=programs._options())
    found = choose(logits, rows, zeros[:, None], zeros, zeros)
    wide = np.float64(logits)
    assert np.array_equal(found.tokens[:num_greedy], wide[:num_greedy].argmax(axis=1))
    if is_filtered:
        wide[num_greedy:] /= TEMPERATURE
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    wanted = np.take_along_axis(wide, np.asarray(found.tokens)[:, None], axis=1)[:, 0]
    np.testing.assert_allclose(found.logprobs, wanted, atol=1e-4)
