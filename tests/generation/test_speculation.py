"""Speculation against texts that are written token by token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zjax.generation.drafts import Drafter
from zjax.generation.sampling import Sampling, choose_tokens, rows_of
from zjax.generation.speculation import verify

VOCAB, LENGTH, NUM_DRAFTS = 7, 40, 3
PROMPTS = ([0, 1, 2, 0, 1], [3], [2, 2, 4, 2], [5, 6], [1, 0, 6, 5, 4], [0, 3])
DRAWN = Sampling(temperature=0.7)
SAMPLINGS = {
    "greedy": [Sampling()] * 6,
    "drawn": [dataclasses.replace(DRAWN, seed=seed) for seed in range(6)],
    "mixed": [
        Sampling(frequency_penalty=0.4),
        dataclasses.replace(DRAWN, top_p=0.8, repetition_penalty=1.2, seed=1),
        Sampling(repetition_penalty=1.3, presence_penalty=0.5),
        dataclasses.replace(DRAWN, presence_penalty=0.6, frequency_penalty=0.2),
        dataclasses.replace(DRAWN, end_ids=(0, 1), min_new_tokens=20, top_k=4),
        Sampling(forbidden_ids=(3,), frequency_penalty=0.1),
    ],
}
TABLE = jnp.array(np.random.default_rng(0).normal(size=(VOCAB, VOCAB, VOCAB)) * 2)
choose = jax.jit(choose_tokens)
check = jax.jit(verify, static_argnames="num_best")


def logits_after(first, second):
    """Logits of a toy model, which sees two tokens."""
    return TABLE[first, second].astype(jnp.float32)


def rows_with_logprobs(name):
    samplings = [dataclasses.replace(x, num_logprobs=0) for x in SAMPLINGS[name]]
    return rows_of(samplings)


@functools.cache
def write_one_by_one(name):
    """Texts of `choose_tokens` alone, and their log-probabilities."""
    history, prompts = lay(PROMPTS)
    rows, lengths = rows_with_logprobs(name), prompts.copy()
    numbers, logprobs = np.arange(len(PROMPTS)), np.zeros(history.shape, np.float32)
    for _ in range(LENGTH):
        last = history[numbers, lengths - 1]
        logits = logits_after(history[numbers, np.maximum(lengths - 2, 0)], last)
        chosen = choose(logits, rows, history, prompts, lengths)
        history[numbers, lengths] = chosen.tokens
        logprobs[numbers, lengths] = chosen.logprobs
        lengths = lengths + 1
    return history, logprobs


def lay(prompts):
    """Prompts from column 0 on, with junk behind, and the lengths."""
    history = np.full((len(prompts), LENGTH + 20), 6, np.int32)
    for row, prompt in enumerate(prompts):
        history[row, : len(prompt)] = prompt
    return history, np.array([*map(len, prompts)], np.int32)


def write_with_drafts(name, propose):
    """Texts of `verify`, log-probabilities, and the number of new tokens of passes.

    `propose(row, text)` has the drafts of a row.
    """
    history, prompts = lay(PROMPTS)
    rows, lengths = rows_with_logprobs(name), prompts.copy()
    numbers, logprobs = np.arange(len(PROMPTS)), np.zeros(history.shape, np.float32)
    passes = []
    while (lengths < prompts + LENGTH).any():
        drafts = np.zeros((len(PROMPTS), NUM_DRAFTS), np.int32)
        num_drafts = np.zeros(len(PROMPTS), np.int32)
        for row, length in enumerate(lengths):
            proposed = propose(row, history[row, :length].tolist())
            num_drafts[row] = len(proposed)
            drafts[row, : len(proposed)] = proposed
        read = np.concatenate([history[numbers, lengths - 1, None], drafts], axis=1)
        before = history[numbers, np.maximum(lengths - 2, 0), None]
        read = read.T, np.concatenate([before, read[:, :-1]], axis=1).T
        logits = logits_after(*read[::-1])
        found = check(logits, drafts, num_drafts, rows, history, prompts, lengths)
        found = jax.device_get(found)
        num_new = (found.tokens >= 0).sum(axis=0)
        for row, number in enumerate(num_new):
            assert (found.tokens[number:, row] == -1).all()
            number = min(number, prompts[row] + LENGTH - lengths[row])
            columns = slice(lengths[row], lengths[row] + number)
            history[row, columns] = found.tokens[:number, row]
            logprobs[row, columns] = found.logprobs[:number, row]
            lengths[row] += number
        passes.append(num_new.tolist())
    return history, logprobs, np.array(passes)


def by_ngrams(_):
    """Proposes what one `Drafter` of each row proposes."""
    drafters = {}

    def propose(row, text):
        drafter, known = drafters.get(row) or (Drafter([]), 0)
        drafter.extend(text[known:])
        drafters[row] = drafter, len(text)
        return drafter.propose(NUM_DRAFTS)

    return propose


def at_random(_):
    """Proposes 0 to 3 random tokens."""
    rng = np.random.default_rng(1)

    def propose(row, text):
        return rng.integers(0, VOCAB, rng.integers(0, NUM_DRAFTS + 1)).tolist()

    return propose


def by_the_future(name):
    """Proposes the right tokens, and a wrong one now and then."""
    right, _ = write_one_by_one(name)
    rng = np.random.default_rng(2)

    def propose(row, text):
        drafts = right[row, len(text) : len(text) + NUM_DRAFTS].copy()
        wrong = rng.random(NUM_DRAFTS) < 0.2
        return np.where(wrong, (drafts + 1) % VOCAB, drafts).tolist()

    return propose


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("make", [by_ngrams, at_random, by_the_future])
def test_texts_are_the_texts_without_speculation(name, make):
    """Fails if a wrong draft is kept, or penalties do not read right drafts."""
    history, logprobs, passes = write_with_drafts(name, make(name))
    wanted, wanted_logprobs = write_one_by_one(name)
    for row, prompt in enumerate(PROMPTS):
        end = len(prompt) + LENGTH
        np.testing.assert_array_equal(history[row, :end], wanted[row, :end])
        np.testing.assert_allclose(
            logprobs[row, :end], wanted_logprobs[row, :end], rtol=1e-5, atol=1e-6
        )
    assert passes.min() == 1
    if make is not at_random:
        assert passes.max() == NUM_DRAFTS + 1 and len(passes) < LENGTH


def test_drafts_are_right_as_far_as_they_are_the_tokens():
    """Fails if a draft behind a wrong one counts, or a draft that no row has."""
    logits = jnp.eye(5)[jnp.array([[1] * 5, [2] * 5, [3] * 5, [4] * 5])]
    drafts = jnp.array([[1, 2, 3], [1, 0, 3], [0, 2, 3], [1, 2, 3], [1, 2, 3]])
    num_drafts = jnp.array([3, 3, 3, 2, 0])
    rows, zeros = rows_of([None] * 5), jnp.zeros(5, jnp.int32)
    found = check(logits, drafts, num_drafts, rows, zeros[:, None], zeros, zeros)
    assert found.tokens.T.tolist() == [
        [1, 2, 3, 4],
        [1, 2, -1, -1],
        [1, -1, -1, -1],
        [1, 2, 3, -1],
        [1, -1, -1, -1],
    ]


def test_the_best_tokens_of_each_position_are_returned():
    logits = jnp.array(np.random.default_rng(3).normal(size=(3, 2, VOCAB)), jnp.float32)
    rows, zeros = rows_of([Sampling(num_logprobs=2)] * 2), jnp.zeros(2, jnp.int32)
    drafts = jnp.zeros((2, 2), jnp.int32)
    history = jnp.zeros((2, 8), jnp.int32)
    found = check(logits, drafts, zeros, rows, history, zeros, zeros, num_best=2)
    np.testing.assert_array_equal(found.best_ids[..., 0], logits.argmax(-1))
    np.testing.assert_array_equal(
        found.best_ids[..., 1], np.argsort(logits, -1)[..., -2]
    )
    assert found.best_logprobs.shape == (3, 2, 2)


def test_several_positions_skip_what_no_row_asks_for():
    """Fails if a condition depends on the position, so that both branches run."""
    rows, zeros = rows_of(SAMPLINGS["mixed"]), jnp.zeros(6, jnp.int32)
    history = jnp.zeros((6, 9), jnp.int32)
    one = jax.make_jaxpr(choose_tokens)(
        jnp.zeros((6, VOCAB)), rows, history, zeros, zeros
    )
    drafts = jnp.zeros((6, 2), jnp.int32)
    several = jax.make_jaxpr(verify)(
        jnp.zeros((3, 6, VOCAB)), drafts, zeros, rows, history, zeros, zeros
    )
    assert str(several).count("cond[") == str(one).count("cond[") > 5
