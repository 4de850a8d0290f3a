"""Drafts of n-grams against a search of the text, and when drafts pay."""

import gc

import numpy as np
import pytest

from zjax.generation import drafts
from zjax.generation.drafts import Drafter, Speculator
from zjax.generation.sequence import Sequence


def expected_drafts(text, num_drafts, max_ngram, min_ngram):
    """Searches the whole text from the end."""
    for size in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(text) - size - 1, -1, -1):
            if size <= len(text) and text[start : start + size] == text[-size:]:
                drafts = []
                for number in range(num_drafts):
                    drafts.append([*text, *drafts][start + size + number])
                return drafts
    return []


@pytest.mark.parametrize("sizes", [(3, 1), (2, 2), (4, 2), (1, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_proposals_are_those_of_a_search_of_the_text(sizes, seed):
    rng = np.random.default_rng(seed)
    text = rng.integers(0, 4, 120).tolist()
    drafter = Drafter(text[:20], max_ngram=sizes[0], min_ngram=sizes[1])
    for end in range(20, 120):
        assert drafter.propose(5) == expected_drafts(text[:end], 5, *sizes)
        drafter.extend(text[end : end + 1])


def test_a_text_without_repetition_has_no_drafts():
    assert Drafter([]).propose(3) == []
    assert Drafter([1, 2, 3]).propose(3) == []
    assert Drafter([1, 1]).propose(0) == []


def test_samples_propose_the_tokens_of_other_samples():
    first = Drafter([1, 2, 3])
    second = Drafter([1, 2, 3], other=first)
    first.extend([4, 5, 6])
    assert second.propose(8) == [4, 5, 6]
    second.extend([4, 9, 3, 4])
    assert second.propose(2) == [9, 3]
    third = Drafter([1, 2, 3], other=second)
    assert third.propose(1) == [4]


def test_a_token_takes_the_same_time_in_a_long_text():
    """Counts the n-grams that are looked up, in a text without repetition."""
    drafter = Drafter(range(1_000))
    looked_up = []

    class Places(dict):
        def __contains__(self, ngram):
            looked_up.append(ngram)
            return super().__contains__(ngram)

    drafter._places = Places(drafter._places)
    assert drafter.propose(4) == []
    assert looked_up == [(997, 998, 999), (998, 999), (999,)]


def watch(tokens, prompt=(1, 2, 3)):
    """Accuracy of a drafter after each token, and whether the token was proposed."""
    drafter, found = Drafter(prompt), []
    for token in tokens:
        is_right = drafter.propose(1) == [token]
        drafter.extend([token])
        found.append((drafter.accuracy, is_right))
    return found


def test_accuracy_is_the_share_of_tokens_that_were_proposed():
    """Fails if a token counts as proposed after it has been seen."""
    rng, wanted = np.random.default_rng(0), 0.0
    for accuracy, is_right in watch(rng.integers(0, 3, 200).tolist()):
        wanted += (is_right - wanted) / 16
        assert accuracy == pytest.approx(wanted)
    assert 0.1 < wanted < 0.6


def test_expected_drafts_are_right_one_after_another():
    drafter = Drafter([])
    drafter.accuracy = 0.5
    assert [drafter.expect(n) for n in range(4)] == [0, 0.5, 0.75, 0.875]


def tokens_until(pays, sequence, tokens):
    """Tokens that a sequence gets before drafts pay, or do not."""
    speculator = Speculator(3)
    for number, token in enumerate(tokens):
        if speculator.pays([sequence]) == pays:
            return number
        sequence.tokens.append(token)
    raise AssertionError("never")


def test_drafts_pay_soon_where_a_text_repeats_and_never_where_it_does_not():
    new = [*range(100, 400)]
    assert 5 < tokens_until(True, Sequence([1, 2, 3, 1], 99), [2, 3, 1] * 9) < 9
    with pytest.raises(AssertionError, match="never"):
        tokens_until(True, Sequence([1, 2, 3, 1], 400), new)


def test_drafts_stop_to_pay_soon_after_the_last_repetition():
    speculator, sequence = Speculator(3), Sequence([1, 2, 3] * 20, 400)
    sequence.tokens += [1, 2, 3] * 20
    num_paid = 0
    for token in range(100, 300):
        num_paid += speculator.pays([sequence])
        sequence.tokens.append(token)
    assert 10 < num_paid < 20


def test_a_pass_has_drafts_for_the_sake_of_all_rows():
    """Fails if one row that repeats makes all others wait for drafts."""
    repeats = Sequence([1, 2, 3], 99)
    repeats.tokens += [1, 2, 3] * 30
    others = [Sequence([100 + i], 99) for i in range(9)]
    speculator = Speculator(3)
    assert speculator.pays([repeats, *others[:4]])
    assert not speculator.pays([repeats, *others])


def test_later_requests_of_a_prompt_are_proposed_earlier_texts():
    speculator, prompt = Speculator(4), [5, 6, 7]
    first = Sequence(prompt, 9)
    first.tokens += [8, 9, 10, 11]
    assert speculator.propose(first) == []
    del first
    gc.collect()
    assert len(speculator._drafters) == 0
    assert speculator.propose(Sequence(prompt, 9)) == [8, 9, 10, 11]
    assert speculator.propose(Sequence(prompt, 3)) == [8, 9]
    assert speculator.propose(Sequence([4, 6, 7], 9)) == []


def test_what_is_remembered_of_prompts_is_bounded(monkeypatch):
    """Fails if one prompt that comes again, or many prompts, fill the memory."""
    monkeypatch.setattr(drafts, "_MAX_NGRAMS", 50)
    monkeypatch.setattr(drafts, "_NUM_PROMPTS", 5)
    speculator = Speculator(4)
    for number in range(40):
        sequence = Sequence([number // 20, 6, 7], 9)
        sequence.tokens += range(100 * number, 100 * number + 10)
        speculator.propose(sequence)
        sizes = [x.num_ngrams for x in speculator._latest.values()]
        assert max(sizes) <= 50 + 33
    for number in range(20):
        speculator.propose(Sequence([number], 9))
    assert len(speculator._latest) == 5
