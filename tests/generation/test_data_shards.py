"""Data shards read and write rows of their own, with pages of their own."""

import random

import pytest

from tests.support.paged_device import Loop, expect
from zjax.generation.balance import rank_shards
from zjax.generation.plan import Size


def make_prompt(rng, length):
    return [rng.randrange(50) for _ in range(length)]


def test_rows_go_to_the_shard_with_the_fewest():
    rng = random.Random(0)
    loop = Loop(num_shards=4)
    sequences = [loop.add(make_prompt(rng, 9), 30) for _ in range(10)]
    plan = loop.plan()
    assert [len(slots.running) for slots in loop.shards] == [3, 3, 2, 2]
    assert loop.scheduler.metrics[:3] == (10, 0, 30)
    # All shards read at once: 3 prompts of 2 chunks are one pass of 6 chunks each.
    assert (plan.size.chunks, len(plan.chunks.slots)) == (6, 24)
    loop.run()
    assert [x.generated for x in sequences] == [expect(x)[0] for x in sequences]


def test_a_prefix_is_found_where_it_is():
    """Fails if a prompt is read again on a shard that has as many rows."""
    rng, loop = random.Random(1), Loop(num_shards=4)
    prompts = [make_prompt(rng, 21) for _ in range(4)]
    first = [loop.add(prompt, 2) for prompt in prompts]
    loop.run()
    again = [loop.add(first[i].tokens[:-1], 2) for i in (2, 0, 3, 1)]
    loop.plan()
    shards = [
        (x.shard, first[i].shard) for x, i in zip(again, (2, 0, 3, 1), strict=True)
    ]
    assert all(new == old for new, old in shards) and len({*shards}) == 4
    loop.run()
    assert loop.scheduler.metrics.num_hit_tokens == 4 * 20


def test_samples_of_many_prompts_stay_together():
    """Fails if each shard reads each prompt."""
    rng, loop = random.Random(2), Loop(num_shards=4, num_pages=400)
    groups = [[make_prompt(rng, 21)] * 4 for _ in range(4)]
    samples = [[loop.add(prompt, 9) for prompt in group] for group in groups]
    loop.step()
    loop.step()
    assert [{x.shard for x in group} for group in samples] == [{0}, {1}, {2}, {3}]
    loop.run()
    assert loop.scheduler.metrics.num_hit_tokens == 4 * 3 * 20


def test_samples_of_one_prompt_spread_over_idle_shards():
    """Fails if all samples wait for the shard that has the prompt."""
    loop = Loop(num_shards=4, num_pages=400)
    samples = [loop.add(make_prompt(random.Random(3), 21), 40) for _ in range(16)]
    loop.step()
    loop.step()
    assert [len(slots.running) for slots in loop.shards] == [4] * 4
    loop.run()
    assert loop.scheduler.metrics.num_hit_tokens == 12 * 20
    assert all(x.generated == expect(x)[0] for x in samples)


def test_a_known_prefix_does_not_leave_shards_idle():
    """Fails if a plan counts a sequence twice that it has just given a slot."""
    rng, loop = random.Random(6), Loop(num_shards=2, num_pages=400)
    first = loop.add(make_prompt(rng, 20), 1)
    loop.run()
    for _ in range(8):
        loop.add([*first.prompt, *make_prompt(rng, 2)], 40)
    loop.step()
    loop.step()
    assert [len(slots.running) for slots in loop.shards] == [4, 4]
    loop.run()


def test_a_plan_looks_at_no_more_sequences_than_there_are_rows(monkeypatch):
    """Fails if each pass goes through a long queue of followers."""
    asked = []
    monkeypatch.setattr(
        "zjax.generation.scheduler.rank_shards",
        lambda sequence, *args: asked.append(sequence) or rank_shards(sequence, *args),
    )
    loop = Loop(num_shards=2, num_pages=400)
    samples = [loop.add(make_prompt(random.Random(5), 60), 2) for _ in range(300)]
    loop.plan()
    assert 1 < len(asked) <= 2 * 8
    loop.run()
    assert all(x.generated == expect(x)[0] for x in samples)


def test_a_sequence_that_does_not_fit_goes_to_another_shard():
    """Fails if the cheapest shard holds up a sequence for which it has no pages."""
    rng, loop = random.Random(4), Loop(num_shards=2, num_pages=10)
    long = loop.add(make_prompt(rng, 30), 6)
    loop.plan()
    short = loop.add(make_prompt(rng, 3), 6)
    loop.plan()
    follower = loop.add([*long.prompt[:20], 1, 2, 3, 4], 1)
    loop.plan()
    assert (long.shard, short.shard, follower.shard) == (0, 1, 1)
    loop.run()


@pytest.mark.parametrize("seed", range(20))
def test_random_requests_on_shards_end_right(seed):
    """Runs requests with prefixes, samples, drafts and aborts in few pages."""
    rng = random.Random(seed)
    loop = Loop(
        num_shards=rng.choice([2, 3, 8]),
        num_pages=rng.choice([14, 20, 60]),
        max_rows=rng.choice([1, 3, 8]),
        lag=rng.choice([0, 1, 2]),
        steps=rng.choice([1, 3, 8]),
        sizes=[Size(2), Size(8), Size(8, 6), Size(3, width=4), Size(6, width=4)],
    )
    heads = [make_prompt(rng, 12) for _ in range(3)]
    sequences, aborted = [], set()
    while len(sequences) < 150 or not loop.is_idle:
        if len(sequences) < 150 and rng.random() < 0.5:
            prompt = rng.choice(heads)[: rng.randint(0, 12)]
            prompt = [*prompt, *make_prompt(rng, rng.randint(1, 10))]
            for _ in range(rng.choice([1, 1, 3])):
                sequences.append(loop.add(prompt, rng.randint(1, 20)))
        if rng.random() < 0.1 and sequences:
            sequence = rng.choice(sequences[-20:])
            if sequence.finish_reason is None:
                loop.scheduler.abort(sequence)
                aborted.add(sequence)
        loop.step()
    loop.run()
    for sequence in sequences:
        tokens = sequence.generated
        wanted = expect(sequence)[0]
        assert tokens == (wanted[: len(tokens)] if sequence in aborted else wanted)
