"""Continuous batching: texts do not depend on what runs beside them, or where."""

import random

import pytest

from tests.support.paged_device import Loop, check_keys, expect
from zjax.generation.plan import Size
from zjax.generation.sequence import Sequence

SIZES = [Size(2), Size(8), Size(4, 2), Size(8, 6)]


def make_loop(**options):
    defaults = {"num_pages": 200, "page_size": 4, "max_rows": 8, "chunk_size": 8}
    return Loop(**defaults | {"sizes": SIZES} | options)


def make_sequence(rng, longest=30, most=20, shared=(), **options):
    prompt = [*shared, *(rng.randrange(50) for _ in range(rng.randint(1, longest)))]
    ends = frozenset(rng.sample(range(50), rng.choice([0, 0, 3])))
    return Sequence(prompt, rng.randint(1, most), ends, **options)


def check_all(sequences):
    for sequence in sequences:
        assert (sequence.generated, sequence.finish_reason) == expect(sequence)


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("chunk_size", [1, 3, 8, 64])
@pytest.mark.parametrize("max_steps", [1, 8])
def test_texts_are_as_alone(lag, chunk_size, max_steps):
    rng = random.Random(7)
    sequences = [make_sequence(rng) for _ in range(40)]
    loop = make_loop(lag=lag, chunk_size=chunk_size, max_steps=max_steps)
    for sequence in sequences:
        loop.scheduler.add(sequence)
        if rng.random() < 0.5:
            loop.step()
            check_keys(loop)
    loop.run()
    check_all(sequences)
    assert len({x.finish_reason for x in sequences}) == 2


def test_samples_of_a_prompt_share_its_pages():
    """Fails if followers read the prompt again, or wait longer than for the pages."""
    rng = random.Random(1)
    prompt = [rng.randrange(50) for _ in range(42)]
    loop = make_loop()
    samples = [loop.scheduler.add(Sequence(prompt, 8)) for _ in range(8)]
    loop.step()
    assert loop.scheduler.metrics[:2] == (1, 7)
    loop.step()
    assert loop.scheduler.metrics[:2] == (7, 1)  # 6 chunks in a pass
    first = samples[0].pages[:10]
    assert [x.pages[:10] for x in samples[:7]] == [first] * 7
    loop.run()
    check_all(samples)
    assert loop.scheduler.metrics.num_hit_tokens == 7 * 40


def test_followers_do_not_hold_up_other_prompts():
    rng = random.Random(2)
    prompts = [[rng.randrange(50) for _ in range(20)] for _ in range(2)]
    loop = make_loop()
    samples = [Sequence(prompt, 1) for prompt in prompts for _ in range(3)]
    for sequence in samples:
        loop.scheduler.add(sequence)
    loop.step()
    assert [x.finish_reason for x in samples] == ["length", None, None] * 2
    loop.step()
    assert {x.finish_reason for x in samples} == {"length"}
    check_all(samples)


def test_a_prompt_is_found_after_its_end_with_its_continuation():
    rng = random.Random(3)
    first = make_sequence(rng, longest=20, most=20)
    loop = make_loop()
    loop.scheduler.add(first)
    loop.run()
    longer = [*first.tokens, 1, 2]
    second = loop.scheduler.add(Sequence(longer, 5))
    loop.run()
    check_all([first, second])
    # The last generated token is not read.
    num_found = (len(first.tokens) - 1) // 4 * 4
    assert loop.scheduler.metrics.num_hit_tokens == num_found > len(first.prompt)


def test_one_token_is_read_of_a_prompt_that_is_cached():
    prompt = [*range(16)]
    loop = make_loop()
    for _ in range(2):
        sequence = loop.scheduler.add(Sequence(prompt, 3))
        loop.run()
        check_all([sequence])
    assert loop.scheduler.metrics.num_hit_tokens == 12


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_preempted_sequences_go_on(lag):
    """Fails if tokens on the way are lost or come twice."""
    rng = random.Random(4)
    sequences = [Sequence([i, *range(i)], 24) for i in range(8)]
    loop = make_loop(num_pages=15, lag=lag, max_length=40)
    for sequence in sequences:
        loop.scheduler.add(sequence)
        if rng.random() < 0.5:
            loop.step()
    loop.run()
    check_all(sequences)
    assert loop.scheduler.metrics.num_preemptions > 2


def test_the_oldest_is_never_preempted():
    loop = make_loop(num_pages=15, max_length=40)
    sequences = [loop.scheduler.add(Sequence([i], 39)) for i in range(8)]
    while loop.scheduler.running or loop.scheduler.waiting:
        alive = [x for x in sequences if x.finish_reason is None]
        loop.step()
        assert alive[0].slot is not None or alive[0].finish_reason
    check_all(sequences)
    assert loop.scheduler.metrics.num_preemptions > 2
