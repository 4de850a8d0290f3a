"""Continuous batching: texts do not depend on what runs beside them, or where."""

import random

import numpy as np
import pytest

from tests.support.paged_device import SIZES, VOCAB, Loop, expect
from tests.support.refusals import config_error
from zjax.generation.plan import Size
from zjax.generation.pool import Pool, most_pages
from zjax.generation.scheduler import Scheduler
from zjax.generation.sequence import Sequence

DRAFTED = (*SIZES, Size(3, width=4), Size(6, width=4))
"""Sizes with two for drafts; more lanes than 6 read no drafts."""


def make_text(rng, shortest, longest):
    return [rng.randrange(50) for _ in range(rng.randint(shortest, longest))]


def make_sequence(rng, longest=30, most=20, shared=()):
    prompt = [*shared, *make_text(rng, 1, longest)]
    ends = frozenset(rng.sample(range(50), rng.choice([0, 0, 3])))
    is_streamed = rng.random() < 0.2
    num_best = rng.choice([None, None, 0, 2])
    num_new = rng.randint(1 if num_best is None else 0, most)
    return Sequence(prompt, num_new, ends, is_streamed, prompt_logprobs=num_best)


def check_all(sequences, loop=None):
    for sequence in sequences:
        assert (sequence.generated, sequence.finish_reason) == expect(sequence)
        if loop is not None:
            scored = sequence.prompt_logprobs is not None
            wanted = [*range(1, len(sequence.prompt))] if scored else []
            assert loop.scored[sequence] == wanted


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("chunk_size", [1, 3, 8, 64])
@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.parametrize("sizes", [SIZES, DRAFTED])
def test_texts_are_as_alone(lag, chunk_size, steps, sizes):
    rng = random.Random(7)
    sequences = [make_sequence(rng) for _ in range(40)]
    loop = Loop(lag=lag, chunk_size=chunk_size, steps=steps, sizes=sizes)
    for sequence in sequences:
        loop.scheduler.add(sequence)
        if rng.random() < 0.5:
            loop.step()
    loop.run()
    check_all(sequences, loop)
    assert len({x.finish_reason for x in sequences}) == 2


def draw_loop(rng, longest, window=0):
    """A loop of few pages, in which the longest text just fits."""
    page_size = rng.choice([1, 2, 3, 4, 16])
    spare = rng.choice([0, 0, 1, 5, 40])
    sizes = rng.choice([SIZES, DRAFTED, [Size(8, 1)]])
    chunk_size, steps = rng.choice([1, 4, 8, 64]), rng.choice([1, 3, 8])
    num_ahead = max(
        size.num_ahead(chunk_size) for size in (*sizes, Size(8, 0, 1, steps))
    )
    return Loop(
        num_pages=1 + most_pages(longest, page_size, window, num_ahead) + spare,
        page_size=page_size,
        max_rows=rng.choice([1, 3, 8]),
        max_length=longest + 1,
        sizes=sizes,
        chunk_size=chunk_size,
        steps=steps,
        lag=rng.choice([0, 1, 2, 5]),
        window=window,
    )


@pytest.mark.parametrize("window", [0, 1, 2, 5, 16, 40])
@pytest.mark.parametrize("seed", range(10))
def test_random_requests_end_right(seed, window):
    """Runs 200 requests with shared prefixes, samples and aborts in few pages.

    Under a window, a sequence never holds more pages than a pass of it sees.
    """
    rng = random.Random(seed)
    loop, aborted = draw_loop(rng, longest=46, window=window), set()
    heads = [make_text(rng, 1, 20) for _ in range(3)]
    most_waiting, share = rng.choice([1, 12]), rng.choice([0, 0.1, 0.4])
    sequences = []
    while len(sequences) < 200 or not loop.is_idle:
        if len(sequences) < 200 and len(loop.scheduler.waiting) < most_waiting:
            shared = rng.choice(heads)[: rng.randint(0, 20)]
            first = make_sequence(rng, longest=16, most=11, shared=shared)
            sequences.append(loop.scheduler.add(first))
            for _ in range(rng.choice([0, 0, 0, 3])):
                sequences.append(loop.add(first.prompt, first.max_new_tokens or 1))
        if rng.random() < share:
            sequence = rng.choice(sequences[-20:])
            if sequence.finish_reason is None:
                loop.scheduler.abort(sequence)
                loop.check()
                aborted.add(sequence)
        assert loop.step() or loop.is_idle
    loop.run()
    check_all((x for x in sequences if x not in aborted), loop)
    for sequence in aborted:
        tokens = sequence.generated
        assert tokens == expect(sequence)[0][: len(tokens)]
        assert sequence.finish_reason == "abort"


def test_samples_of_a_prompt_share_its_pages():
    """Fails if followers read the prompt again, or wait longer than for the pages."""
    prompt = make_text(random.Random(1), 42, 42)
    loop = Loop()
    samples = [loop.add(prompt, 8) for _ in range(8)]
    loop.step()
    assert loop.scheduler.metrics[:2] == (1, 7)
    loop.step()
    assert loop.scheduler.metrics[:2] == (7, 1)  # 6 chunks in a pass
    first = samples[0].pages[:10]
    assert [x.pages[:10] for x in samples[:7]] == [first] * 7
    loop.run()
    check_all(samples)
    assert loop.scheduler.metrics.num_hit_tokens == 7 * 40


def most_live(window, num_new=50):
    """Most pages of 4 tokens at once of a text that is written alone."""
    loop = Loop(max_length=200, steps=1, sizes=[Size(8, 2)], window=window)
    sequence = loop.add([*range(8)], num_new)
    numbers = []
    while loop.step():
        numbers.append(loop.pool.num_live)
    check_all([sequence])
    return max(numbers)


def test_pages_behind_a_window_are_free_for_others():
    """Fails if nothing is freed, or too late."""
    assert most_live(window=0) == 14
    assert [most_live(window=number) for number in (5, 8, 9, 10)] == [2, 3, 3, 4]
    with_room = Loop(num_pages=8, max_length=200, sizes=[Size(8, 2)], window=8)
    sequences = [with_room.add([i, *range(80)], 60) for i in range(3)]
    with_room.run()
    check_all(sequences)


@pytest.mark.parametrize("lag", [0, 2])
def test_prefixes_are_found_by_the_pages_that_the_next_token_sees(lag):
    """Fails if a prefix needs pages that others have long taken, or finds too much."""
    loop = Loop(num_pages=8, max_length=200, sizes=[Size(8, 1)], window=8, lag=lag)
    first = loop.add(make_text(random.Random(3), 40, 40), 20)
    loop.run()
    assert loop.pool.match(first.keys(4)[:4]) == []
    second = loop.add([*first.tokens, 1], 8)
    loop.run()
    check_all([first, second])
    assert loop.scheduler.metrics.num_hit_tokens == 56  # the last token is not read


def test_samples_of_a_prompt_share_its_pages_in_the_window():
    prompt = make_text(random.Random(1), 42, 42)
    loop = Loop(window=8)
    samples = [loop.add(prompt, 8) for _ in range(8)]
    loop.step()
    loop.step()
    assert [x.pages[:10] for x in samples[1:7]] == [
        8 * [0] + samples[0].pages[8:10]
    ] * 6
    loop.run()
    check_all(samples)
    assert loop.scheduler.metrics.num_hit_tokens == 7 * 40


def test_followers_do_not_hold_up_other_prompts():
    rng = random.Random(2)
    prompts = [make_text(rng, 20, 20) for _ in range(2)]
    loop = Loop()
    samples = [loop.add(prompt, 1) for prompt in prompts for _ in range(3)]
    loop.step()
    assert [x.finish_reason for x in samples] == ["length", None, None] * 2
    loop.step()
    assert {x.finish_reason for x in samples} == {"length"}
    check_all(samples)


@pytest.mark.parametrize("num_passes", [0, 1, 2])
def test_followers_of_an_aborted_sample_go_on(num_passes):
    prompt = make_text(random.Random(3), 40, 40)
    loop = Loop(sizes=[Size(8, 2)])
    samples = [loop.add(prompt, 8) for _ in range(3)]
    for _ in range(num_passes):
        loop.step()
    assert samples[1].slot is None
    loop.scheduler.abort(samples[0])
    loop.run()
    check_all(samples[1:])
    # The second reads what the first has not; the third finds all but the last page.
    found = 16 * num_passes + 36
    assert loop.scheduler.metrics.num_hit_tokens == found


def test_a_prompt_is_found_after_its_end_with_its_continuation():
    loop = Loop()
    first = loop.add(make_text(random.Random(3), 9, 9), 14)
    loop.run()
    second = loop.add([*first.tokens, 1, 2], 5)
    loop.run()
    check_all([first, second])
    # 5 full pages: the last generated token is not read.
    assert loop.scheduler.metrics.num_hit_tokens == 20


def test_one_token_at_least_is_read_of_a_prompt_that_is_cached():
    loop = Loop()
    for _ in range(2):
        sequence = loop.add([*range(16)], 3)
        loop.run()
        check_all([sequence])
    assert loop.scheduler.metrics.num_hit_tokens == 12


def test_pages_are_shared_under_one_salt():
    """Fails if keys that depend on more than tokens are found by tokens alone."""
    loop = Loop()
    for salt in (b"", b"long", b"short", b"long"):
        loop.add([*range(16)], 3, salt=salt)
        loop.run()
    assert loop.scheduler.metrics.num_hit_tokens == 12


def test_a_prompt_to_score_is_read_whatever_the_cache_has():
    """Fails if keys are found whose scores nobody has computed."""
    loop = Loop()
    prompt = make_text(random.Random(3), 21, 21)
    for num_best, num_new in ((None, 1), (0, 2), (3, 0), (None, 1)):
        sequence = loop.add(prompt, num_new, prompt_logprobs=num_best)
        loop.run()
        check_all([sequence], loop)
    assert loop.scheduler.metrics.num_hit_tokens == 20  # of the last alone


def test_equal_prompts_to_score_do_not_wait_for_each_other():
    """Fails if a prompt awaits pages that it reads itself."""
    loop = Loop(sizes=[Size(8, 6)])
    prompt = [*range(16)]
    sequences = [loop.add(prompt, 0, prompt_logprobs=0) for _ in range(3)]
    loop.step()
    assert [x.finish_reason for x in sequences] == ["length"] * 3
    loop.run()
    check_all(sequences, loop)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_preempted_prompt_goes_on_behind_its_scores(lag):
    """Fails if scores come twice, or keys of scored tokens are read again."""
    loop = Loop(num_pages=13, lag=lag, sizes=[Size(8, 1)], max_length=48, steps=1)
    first = [loop.add([i], 16) for i in range(2)]
    while not all(x.is_decoding for x in first):
        loop.step()
    prompt = make_text(random.Random(3), 30, 30)
    second = loop.add(prompt, 3, prompt_logprobs=1)
    while not second.num_scored:
        loop.step()
    loop.scheduler._preempt(second)
    num_scored = second.num_scored
    assert 0 < num_scored < 30
    loop.run()
    check_all([*first, second], loop)
    found = loop.scheduler.metrics.num_hit_tokens
    assert num_scored // 4 * 4 <= found <= (num_scored + lag * 8) // 4 * 4


def test_only_passes_with_prompts_to_score_run_the_program_that_scores():
    """Fails if the passes of others carry the arrays of scores."""
    loop = Loop(sizes=[Size(8, 2)], steps=1)
    plain = loop.add([*range(20)], 3)
    loop.run()
    scored = loop.add([*range(30)], 3, prompt_logprobs=2)
    beside = loop.add([7] * 3, 3)
    loop.run()
    check_all([plain, scored, beside], loop)
    found = [x.chunks.num_best for x in loop.plans]
    has_scores = [x is not None for x in found]
    assert sum(has_scores) == 2 and not any(has_scores[:4])
    scores = [x.tolist() for x in found if x is not None]
    assert scores == [[2, 2], [2, 2]]
    assert all(plan.lanes.num_best is None for plan in loop.plans)


def test_other_pages_make_room_for_the_prefix_in_use():
    """Fails if admission counts a cached page both as found and as room."""
    loop = Loop(num_pages=9)
    old = loop.add([*range(13)], 1)
    loop.run()
    running = loop.add([40] * 15, 5)
    loop.step()
    # The first finds 3 pages, and 1 is free of the 2 to fill.
    follower = loop.add([*range(13), 5, 6, 7, 8], 1)
    loop.step()
    assert follower.slot is None
    loop.run()
    check_all([old, running, follower])
    assert loop.scheduler.metrics.num_preemptions == 0


def test_nobody_is_admitted_to_be_preempted():
    """Fails if a prompt takes the page that a lane needs next."""
    loop = Loop(num_pages=6)
    first, second = loop.add([1, 2, 3, 4], 9), loop.add([*range(16)], 4)
    loop.step()
    assert (loop.pool.num_available, second.slot) == (4, None)
    loop.run()
    check_all([first, second])
    assert loop.scheduler.metrics.num_preemptions == 0


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("sizes", [SIZES, DRAFTED])
def test_preempted_sequences_go_on(lag, sizes):
    """Fails if tokens on the way are lost or come twice."""
    rng = random.Random(4)
    loop = Loop(num_pages=15, lag=lag, max_length=40, sizes=sizes)
    sequences = []
    for i in range(8):
        sequences.append(loop.add([i, *range(i)], 24))
        if rng.random() < 0.5:
            loop.step()
    loop.run()
    check_all(sequences)
    assert loop.scheduler.metrics.num_preemptions > 2


def test_the_oldest_is_never_preempted():
    loop = Loop(num_pages=15, max_length=40)
    sequences = [loop.add([i], 39) for i in range(8)]
    while not loop.is_idle:
        oldest = next(x for x in sequences if x.finish_reason is None)
        loop.step()
        assert oldest.slot is not None or oldest.finish_reason
    check_all(sequences)
    assert loop.scheduler.metrics.num_preemptions > 2


def test_first_come_are_first_served():
    """Fails if a prompt passes an earlier one, or a chunk stays empty for no reason."""
    rng = random.Random(5)
    loop = Loop(max_rows=4, sizes=[Size(4, 2)])
    sequences = [loop.add(make_text(rng, 1, 30), rng.randint(1, 9)) for _ in range(50)]
    first_passes = {}
    while not loop.is_idle:
        plan = loop.plan()
        if plan is None:
            loop.accept()
            continue
        for place in plan.places:
            first_passes.setdefault(place.sequence, plan.number)
        could_admit = loop.scheduler.waiting and not loop.slots.is_full
        could_read = could_admit or any(x.is_reading for x in loop.slots.running)
        assert not could_read or (plan.chunks.counts > 0).all()
    check_all(sequences)
    order = [first_passes[x] for x in sequences]
    assert order == sorted(order)


def test_a_long_prompt_is_read_beside_running_lanes():
    loop = Loop(steps=1, max_length=200)
    first = loop.add([1], 40)
    loop.step()
    second = loop.add([*range(50)] * 2, 1)
    passes = [loop.plan() for _ in range(4)]
    assert [len(x.places) for x in passes] == [1, 1, 2, 1]
    assert [x.size for x in passes] == [Size(8, 6)] * 2 + [Size(4, 2), Size(2)]
    assert [x.chunks.ends.tolist() for x in passes[2:]] == [[True, False], []]
    loop.run()
    check_all([first, second])


@pytest.mark.parametrize("lag", [1, 2, 3])
@pytest.mark.parametrize("length", [5, 6, 7, 8])
def test_stale_lanes_harm_nobody(lag, length):
    """Fails if pages are taken while an earlier pass writes them, in other order."""
    loop = Loop(num_pages=5, lag=lag, steps=2)
    prompt = [7] * length
    tokens, _ = expect(Sequence(prompt, 8))
    first = loop.add(prompt, 8, {tokens[1]})
    while first.finish_reason is None:
        loop.step()
    stale = {page for x in loop.flying for page in x.tables[0][x.lanes.slots[0]]} - {0}
    assert stale and first.finish_reason == "stop"
    second = loop.add(make_text(random.Random(0), 12, 12), 4)
    third = loop.add([*first.tokens, 9], 2)
    loop.step()
    assert stale & set(second.pages)
    loop.run()
    check_all([first, second, third])


def test_an_ended_sequence_ignores_later_results():
    loop = Loop(lag=2)
    sequence = loop.add([1, 2], 9)
    other = loop.add([3], 9)
    loop.step()
    loop.step()
    loop.scheduler.finish(sequence, "stop")
    loop.scheduler.abort(sequence)
    loop.run()
    assert (sequence.generated, sequence.finish_reason) == ([], "stop")
    check_all([other])


def test_plans_do_not_change_after_they_are_made():
    """Fails if a later plan writes the table of an earlier one, or copies too often."""
    loop = Loop(steps=1)
    loop.add([1, 2], 9)
    plans = [loop.plan() for _ in range(5)]
    assert [x.tables[0][0].tolist()[:2] for x in plans] == [[1, 0]] * 3 + [[1, 2]] * 2
    assert plans[0].tables[0] is plans[2].tables[0]
    assert plans[3].tables[0] is plans[4].tables[0]
    assert not plans[4].tables[0][-1].any()
    loop.run()


def steps_of(lefts, **options):
    """Steps of the next pass of lanes by the tokens that are left."""
    loop = Loop(max_length=300, **options)
    sequences = [loop.add([3 + i, 1, 2], left + 1) for i, left in enumerate(lefts)]
    while any(x.slot is None or x.is_reading for x in sequences):
        loop.plan()
    return loop, loop.plan()


def test_lanes_take_several_steps_where_most_are_of_use():
    """Fails if a pass of several steps is planned for little, or not at all."""
    assert [steps_of([left])[1].size.steps for left in (50, 8, 7, 6, 1)] == [
        *(8, 8, 8, 1, 1)
    ]
    assert steps_of([50], steps=5)[1].size.steps == 5
    _, plan = steps_of([50] * 7 + [2])  # 58 of 64 are of use
    assert plan.size.steps == 8
    assert plan.lanes.counts.tolist() == [8] * 7 + [2]
    assert steps_of([50] * 5 + [1])[1].size.steps == 1  # 41 of 48


def test_a_pass_of_several_steps_alone_serves_all():
    """Fails if lanes read behind the end of a text, where no other size is there."""
    loop = Loop(sizes=[Size(8, 6), Size(8, steps=8)], steps=1)
    sequences = [loop.add([i], 3 + i) for i in range(3)]
    loop.run()
    check_all(sequences)


def test_steps_preempt_nobody():
    """Fails if lanes take more steps than the pages hold."""
    for num_pages, steps in ((6, 1), (9, 1), (11, 8)):
        loop, plan = steps_of([7, 7], num_pages=num_pages, page_size=2)
        assert plan.size.steps == steps
        assert loop.scheduler.metrics.num_preemptions == 0


def test_streamed_tokens_come_one_by_one():
    loop = Loop()
    for is_streamed in (False, True):
        loop.add([1], 20, is_streamed=is_streamed)
    loop.step()
    assert loop.plan().size.steps == 1


def test_drafts_make_passes_fewer():
    def count(sizes):
        loop = Loop(sizes=sizes, steps=1)
        loop.scheduler.speculator.pays = lambda lanes: True
        sequences = [loop.add([i], 40) for i in range(3)]
        loop.run()
        check_all(sequences)
        return len(loop.plans)

    assert count([Size(8, 6)]) == 40
    assert 12 < count([Size(8, 6), Size(8, width=4)]) < 30


def test_drafts_wait_for_the_tokens_before_them():
    """Fails if drafts are proposed ahead of results, or nothing is planned ahead."""
    loop = Loop(sizes=DRAFTED, lag=1)
    loop.scheduler.speculator.pays = lambda lanes: loop.is_sure
    loop.scheduler.speculator.propose = lambda sequence: [VOCAB] * 3
    sequence = loop.add([1], 40)
    loop.is_sure = False
    ahead = [loop.plan() for _ in range(2)]
    loop.is_sure = True
    assert None not in ahead and loop.plan() is None
    loop.accept()
    assert loop.plan() is None
    loop.accept()
    plan = loop.plan()
    assert plan.size == Size(3, width=4)
    assert plan.lanes.counts.tolist() == [4, 0, 0]
    assert plan.lanes.drafts.tolist() == [[VOCAB] * 3, [0] * 3, [0] * 3]
    loop.is_sure = False
    assert loop.plan() is None
    loop.accept()  # all drafts are wrong
    assert loop.plan().lanes.starts[0] == plan.lanes.starts[0] + 1
    loop.run()
    check_all([sequence])


def test_prompts_are_read_without_drafts():
    """Fails if a prompt waits for lanes with drafts, or is read beside drafts."""
    loop = Loop(sizes=DRAFTED)
    loop.scheduler.speculator.pays = lambda lanes: True
    first = loop.add([1], 30)
    loop.step()
    second = loop.add([*range(60)], 1)
    plans = [loop.plan() for _ in range(2)]
    assert [x.size.width for x in plans] == [1, 1]
    assert [x.chunks.counts.sum() for x in plans] == [48, 12]
    loop.run()
    check_all([first, second])
    assert loop.scheduler.metrics.num_drafts > 0


@pytest.mark.parametrize("seed", range(3))
def test_no_page_is_lost_in_thousands_of_texts_that_repeat(seed):
    """Runs drafters of their own texts, in few pages, with ends and aborts."""
    rng = random.Random(seed)
    sizes = (*SIZES, Size(8, width=5))
    loop = Loop(num_pages=30, sizes=sizes, lag=1, guesses=False)
    period, sequences = make_text(rng, 3, 3), []
    while len(sequences) < 700 or not loop.is_idle:
        if len(sequences) < 700 and len(loop.scheduler.waiting) < 4:
            sequence = Sequence(period * rng.randint(1, 4), rng.randint(1, 40))
            # The oracle goes on with the period, and leaves it now and then.
            ends = rng.randint(1, 40)
            rest = [period[i % 3] if i % ends else 49 for i in range(60)]
            sequence.truth = np.array([*sequence.prompt, *rest])
            sequences.append(loop.scheduler.add(sequence))
        if rng.random() < 0.05:
            loop.scheduler.abort(rng.choice(sequences[-10:]))
        assert loop.step() or loop.is_idle
    loop.run()
    metrics = loop.scheduler.metrics
    assert 0 < metrics.num_accepted_drafts < metrics.num_drafts
    assert metrics.num_preemptions > 0
    for x in sequences:
        assert x.generated == x.truth[len(x.prompt) :][: len(x.generated)].tolist()
        assert x.finish_reason == "abort" or len(x.generated) == x.max_new_tokens


def test_metrics():
    loop = Loop(max_rows=2)
    assert loop.scheduler.metrics == (0,) * 8
    for _ in range(3):
        loop.add([*range(10)], 2)
    loop.step()
    assert loop.scheduler.metrics == (1, 2, 3, 0, 0, 0, 0, 0)
    loop.run()
    assert loop.scheduler.metrics == (0, 0, 0, 2, 16, 0, 0, 0)


def test_metrics_count_drafts():
    loop = Loop(sizes=DRAFTED)
    loop.scheduler.speculator.pays = lambda lanes: True
    sequence = loop.add([1], 5)
    right = expect(sequence)[0]
    loop.scheduler.speculator.propose = lambda x: [*right[1:3], VOCAB]
    loop.run()
    # The first token follows the prompt, and the last needs no draft.
    assert loop.scheduler.metrics[6:] == (3, 2)


def test_requests_that_never_fit_are_refused():
    scheduler = Scheduler([Pool(5, 4)], 2, 40, [Size(2, 1)])
    scheduler.add(Sequence([1] * 10, 7))
    with config_error(
        "max_new_tokens=8 after 10 tokens needs 5 pages of 4 tokens, and the cache has "
        "4; ask for fewer, shorten the prompt, or enlarge the cache"
    ):
        scheduler.add(Sequence([1] * 10, 8))
    with config_error(
        "max_new_tokens=31 after 10 tokens is more than 40; ask for 30 or fewer, or "
        "shorten the prompt\n"
        "max_new_tokens=31 after 10 tokens needs 10 pages of 4 tokens, and the cache "
        "has 4; ask for fewer, shorten the prompt, or enlarge the cache"
    ):
        scheduler.add(Sequence([1] * 10, 31))
    with config_error(
        "prompt=[] has no token; give one token or more\n"
        "max_new_tokens=0 is below 1; ask for 1 or more"
    ):
        scheduler.add(Sequence([], 0))
    with config_error(
        "max_new_tokens=0 after 17 tokens needs 5 pages of 4 tokens, and the cache has "
        "4; shorten the prompt, or enlarge the cache"
    ):
        scheduler.add(Sequence([1] * 17, 0, prompt_logprobs=0))
    assert scheduler.metrics.num_waiting == 1


def test_texts_of_any_length_fit_the_pages_of_a_window():
    scheduler = Scheduler([Pool(5, 4, window=8)], 2, 40, [Size(2, 1)], chunk_size=4)
    scheduler.add(Sequence([1] * 10, 30))
    scheduler = Scheduler([Pool(5, 4, window=9)], 2, 40, [Size(2, 2)], chunk_size=4)
    with config_error(
        "max_new_tokens=30 after 10 tokens needs 5 pages of 4 tokens, and the cache "
        "has 4; ask for fewer, shorten the prompt, or enlarge the cache"
    ):
        scheduler.add(Sequence([1] * 10, 30))


def test_rows_without_lanes_are_refused():
    with config_error(
        "max_rows=9 is more than the 8 lanes of a pass with chunks; add a larger size, "
        "or use fewer rows"
    ):
        Scheduler([Pool(5, 4)], 9, 40, [Size(64), Size(8, 2)])


def test_results_come_in_order():
    loop = Loop(lag=2)
    loop.add([1, 2], 9)
    _, second = loop.plan(), loop.plan()
    with pytest.raises(AssertionError, match="in order"):
        loop.scheduler.accept(second, np.zeros((8, 8), np.int32))
