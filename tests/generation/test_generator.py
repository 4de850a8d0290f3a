"""Texts of a `Generator` are those that each request gets alone."""

import asyncio
import dataclasses
import functools
import gc
import itertools
import logging
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import language
from zjax.data.prompts import Prompts, is_ids, read_ids
from zjax.data.tokenizer import make_bytes
from zjax.errors import ConfigError, DataError
from zjax.generation.generator import Generator
from zjax.generation.sampling import Sampling
from zjax.generation.sizes import size_problems
from zjax.settings import schema

RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(0, 29, size=n).tolist() for n in (3, 9, 1, 12, 5, 7)]
LETTERS = dataclasses.replace(language.LLAMA, num_layers=1, vocab_size=257)
LONG = dataclasses.replace(language.LLAMA, num_layers=1, max_length=160)
DRAWN = Sampling(max_new_tokens=4, temperature=1.3, top_k=12, seed=7)


@functools.cache
def model():
    return language.make_language_model(language.LLAMA)


def make(**numbers):
    return Generator(model(), **({"max_rows": 4} | numbers))


@pytest.fixture(scope="module")
def generator():
    with make() as generator:
        yield generator


def ids_of(texts):
    return [text.ids for text in texts]


def test_greedy_texts_are_those_of_each_prompt_alone(generator):
    """Fails if a neighbour, or the order of requests, changes a text."""
    texts = generator.generate(PROMPTS, Sampling(max_new_tokens=4))
    for prompt, ids in zip(PROMPTS, ids_of(texts), strict=True):
        assert [*ids] == language.likely_tokens(model(), prompt, ids, 16)
    assert [text.prompt for text in texts] == [*range(6)]
    assert {text.finish_reason for text in texts} == {"length"}
    backwards = generator.generate(PROMPTS[::-1], Sampling(max_new_tokens=4))
    assert ids_of(backwards) == ids_of(texts)[::-1]


@pytest.mark.usefixtures("unfiltered")
@pytest.mark.parametrize(
    ("scaling", "first", "second"),
    [
        # Prompt and new tokens: short then long, for 64 shared tokens of a page.
        (
            schema.Longrope(
                original_length=80, short_factors=(1.0, 1.0), long_factors=(4.0, 9.0)
            ),
            (70, 4),
            (70, 20),
        ),
        (schema.DynamicRope(factor=4.0, original_length=16), (70, 4), (110, 4)),
    ],
)
def test_texts_of_other_lengths_share_no_keys_that_depend_on_length(
    scaling, first, second
):
    """Fails if the keys of a short text are taken for a long text."""
    positions = schema.Rotary(scaling=scaling)
    changes = {"num_layers": 1, "max_length": 128, "positions": positions}
    config = dataclasses.replace(language.LLAMA, **changes)
    model = language.make_language_model(config)
    tokens = np.random.default_rng(6).integers(0, 29, size=128).tolist()

    def logprobs(generator, num_given, num_new):
        sampling = Sampling(max_new_tokens=num_new, num_logprobs=0)
        return generator.generate([tokens[:num_given]], sampling)[0].logprobs

    with Generator(model, max_rows=1) as generator:
        alone = logprobs(generator, *second)
    with Generator(model, max_rows=1) as generator:
        logprobs(generator, *first)
        np.testing.assert_allclose(logprobs(generator, *second), alone, atol=1e-5)
        logprobs(generator, *second)
        assert generator.metrics.scheduler.num_hit_tokens == 64  # of the equal text


def test_drawn_texts_depend_on_seed_and_sample_alone(generator):
    alone = [generator.generate([prompt], DRAWN)[0] for prompt in PROMPTS]
    assert ids_of(generator.generate(PROMPTS, DRAWN)) == ids_of(alone)
    other = Sampling(max_new_tokens=4, temperature=1.3, top_k=12, seed=8)
    assert ids_of(generator.generate(PROMPTS, other)) != ids_of(alone)
    many = Sampling(max_new_tokens=4, temperature=1.3, top_k=12, seed=7, num_samples=3)
    texts = generator.generate(PROMPTS[:2], many)
    assert [(x.prompt, x.sample) for x in texts] == [
        (i, j) for i in (0, 1) for j in range(3)
    ]
    assert ids_of(texts)[::3] == ids_of(alone)[:2]
    assert len({tuple(ids) for ids in ids_of(texts)[:3]}) > 1


def test_each_prompt_may_have_a_seed(generator):
    """Fails if equal prompts of one call share their draws."""
    both = ids_of(generator.generate([PROMPTS[0]] * 2, DRAWN, seeds=[7, 8]))
    [first] = ids_of(generator.generate([PROMPTS[0]], DRAWN))
    assert both[0] == first
    assert both[1] != first


def test_log_probabilities_are_those_of_the_whole_sequence(generator):
    [text] = generator.generate(
        [PROMPTS[1]], Sampling(max_new_tokens=4, num_logprobs=3)
    )
    tokens = jnp.array([PROMPTS[1] + text.ids])
    logits = language.logits_of(model(), {"tokens": tokens})[0, 8:-1]
    wanted = np.asarray(jax.nn.log_softmax(logits))
    chosen = wanted[np.arange(4), text.ids]
    np.testing.assert_allclose(text.logprobs, chosen, atol=1e-4)
    for place, best in enumerate(text.best):
        order = np.argsort(-wanted[place])[:3]
        assert [*best] == order.tolist()
        np.testing.assert_allclose([*best.values()], wanted[place][order], atol=1e-4)


def test_news_join_to_the_text(generator):
    wanted = generator.generate([PROMPTS[0]], DRAWN)[0].ids
    deltas = [*generator.stream(PROMPTS[0], DRAWN)]
    assert [token for delta in deltas for token in delta.ids] == wanted
    assert [delta.finish_reason for delta in deltas][-1] == "length"
    assert max(len(delta.ids) for delta in deltas) == 1

    async def read():
        return [d async for d in generator.stream_async(PROMPTS[0], DRAWN)]

    async def read_all():
        return await asyncio.gather(*[read() for _ in range(6)])

    for found in asyncio.run(read_all()):
        assert [token for delta in found for token in delta.ids] == wanted


def test_a_ticket_that_is_cancelled_leaves_nothing(generator):
    ticket = generator.submit([1, 2], Sampling(max_new_tokens=14))
    ticket.cancel()
    reasons = [delta.finish_reason for delta in ticket if delta.finish_reason]
    assert reasons in (["abort"], ["length"])
    generator.generate([[3]], Sampling(max_new_tokens=1))
    served = generator.metrics.scheduler
    assert (served.num_running, served.num_waiting, served.num_live_pages) == (0, 0, 0)


def test_a_request_to_a_closed_generator_is_refused():
    """Fails if nobody answers a request that comes too late, or comes while it ends."""
    generator = make()
    generator.close()
    ticket = generator.submit([1, 2], Sampling(max_new_tokens=2))

    async def read():
        return [delta async for delta in ticket]

    with pytest.raises(ConfigError) as error:
        asyncio.run(asyncio.wait_for(read(), timeout=30))
    text = "generator='closed' writes no more texts; make another"
    assert str(error.value) == text


@pytest.mark.parametrize("call", ["generate", "generate_each"])
def test_a_call_that_is_interrupted_ends_its_texts(generator, call, monkeypatch):
    """Fails if texts that nobody waits for keep the rows of a generator that lives."""
    cancelled = []

    def interrupt(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(generator, "_collect", interrupt)
    monkeypatch.setattr(generator, "_cancel", lambda x: cancelled.append(x.prompt_ids))
    with pytest.raises(KeyboardInterrupt):
        [*getattr(generator, call)([[1, 2], [3]], Sampling(max_new_tokens=14))]
    assert cancelled == [[1, 2], [3]]


def test_a_function_ends_texts_between_passes(generator):
    """Fails if a call waits for its texts, or the generator ends with them."""
    long = Sampling(max_new_tokens=14)
    texts = generator.generate([[1, 2], [3]], long, stopped=lambda: True)
    assert [text.finish_reason for text in texts] == ["abort"] * 2
    texts = generator.generate([[1, 2]], Sampling(max_new_tokens=2))
    assert [text.finish_reason for text in texts] == ["length"]


def test_a_generator_that_nobody_closes_frees_its_engine(compiled_ahead):
    """Fails if the thread holds weights and pages once the generator is gone."""
    with compiled_ahead():
        generator = make()
        ticket = generator.submit([1, 2], Sampling(max_new_tokens=2))
        engine = weakref.ref(generator._worker._runner.engine)
        thread = generator._worker._thread
        del generator
        assert len([*ticket]) > 0  # a ticket keeps the generator
    del ticket
    gc.collect()
    thread.join(timeout=30)
    gc.collect()
    assert engine() is None


def test_a_loop_that_ends_before_its_texts_ends_nothing_else(generator):
    """Fails if news for an event loop that is closed end the engine."""

    async def leave():
        ticket = generator.submit([1, 2], Sampling(max_new_tokens=14))
        async for _ in ticket:
            return

    for _ in range(3):
        asyncio.run(leave())
        assert generator.generate([[3]], Sampling(max_new_tokens=2))


@pytest.mark.usefixtures("greedy")
def test_texts_are_the_same_where_pages_run_out():
    """Fails if a row that gives its pages to an older one goes on with other keys."""
    prompts = [(np.arange(40) % 29).tolist()[i:] for i in range(4)]
    wide = language.make_language_model(LONG)
    sampling = Sampling(max_new_tokens=80)
    with Generator(wide, max_rows=4, num_pages=6) as generator:
        found = ids_of(generator.generate(prompts, sampling))
        assert generator.metrics.scheduler.num_preemptions > 0
    for prompt, ids in zip(prompts, found, strict=True):
        assert len(ids) == 80
        assert [*ids] == language.likely_tokens(wide, prompt, ids, 160)


@pytest.mark.usefixtures("greedy")
def test_prefixes_are_read_once():
    prefix = (np.arange(70) % 29).tolist()
    wide, sampling = language.make_language_model(LONG), Sampling(max_new_tokens=5)
    prompts = [[*prefix, 3], [*prefix, 3], [*prefix, 4, 5]]
    with Generator(wide, max_rows=4) as generator:
        found = [generator.generate([prompt], sampling)[0].ids for prompt in prompts]
        assert generator.metrics.scheduler.num_hit_tokens == 2 * 64
    for ids, prompt in zip(found, prompts, strict=True):
        assert [*ids] == language.likely_tokens(wide, prompt, ids, 160)


@pytest.mark.usefixtures("unfiltered")
def test_strings_end_a_text():
    """Fails if a stop string that spans tokens is missed, or stays in the text."""
    decoder = language.make_language_model(LETTERS)
    prompts = Prompts(make_bytes())
    sampling = Sampling(max_new_tokens=12, temperature=1.0, seed=3)
    with Generator(decoder, prompts=prompts, max_rows=4) as generator:
        [free] = generator.generate(["ab"], sampling)
        assert free.text == bytes(x for x in free.ids if x < 256).decode(
            errors="replace"
        )
        shown = [i for i, x in enumerate(free.ids) if x < 128]
        start = next(i for i, j in itertools.pairwise(shown) if j == i + 1)
        stop = bytes(free.ids[start : start + 2]).decode()
        ended = dataclasses.replace(sampling, stop=(stop,))
        [text] = generator.generate(["ab"], ended)
        assert text.finish_reason == "stop" and text.ids == free.ids[: start + 2]
        assert text.text == free.text[: free.text.index(stop)]
        joined = [*generator.stream("ab", ended)]
        assert "".join(delta.text for delta in joined) == text.text
        ids = dataclasses.replace(sampling, end_ids=(free.ids[start + 1],))
        [text] = generator.generate(["ab"], ids)
        assert text.finish_reason == "stop" and text.ids[-1] == free.ids[start + 1]
        # The end id has a letter, which is no part of the text.
        assert text.text == bytes(x for x in text.ids[:-1] if x < 256).decode(
            errors="replace"
        )


def test_all_requests_that_cannot_be_served_are_named(generator):
    with pytest.raises(ConfigError) as error:
        generator.generate([[1], [2] * 14, [29]], Sampling(max_new_tokens=4, top_p=0.0))
    assert str(error.value) == (
        "top_p=0.0 is not above 0 and up to 1; use 1 for all\n"
        "max_new_tokens=4 after 14 tokens is more than 16; ask for 2 or fewer, or "
        "shorten the prompt\n"
        "prompt='[29]' has 29, which is no id of 29; check the ids"
    )
    with pytest.raises(ConfigError) as error:
        generator.generate(["text"])
    assert str(error.value) == (
        "prompt='text' is text, and the model has no tokenizer; give ids"
    )


IDS_REMEDY = "give a list of prompts, each a text or int[n]"


@pytest.mark.parametrize(
    ("prompts", "text"),
    [
        (
            [np.array([1.7, 2.2])],
            "prompt='[1.7 2.2]' is of float64, and ids are integers; " + IDS_REMEDY,
        ),
        (
            [np.ones((1, 2), int)],
            "prompt='[[1 1]]' has 2 dims, and ids have 1; " + IDS_REMEDY,
        ),
        ("abc", "prompts='abc' is one prompt; give a list of prompts"),
    ],
)
def test_prompts_that_are_no_lists_of_ids_are_named(generator, prompts, text):
    """Fails if a prompt is read as other ids, or ends in an error of Python."""
    with pytest.raises(ConfigError) as error:
        generator.generate(prompts, Sampling(max_new_tokens=2))
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ([1.5], "prompt='[1.5]' is of float64, and ids are integers; " + IDS_REMEDY),
        (5, "prompt='5' has 0 dims, and ids have 1; " + IDS_REMEDY),
    ],
)
def test_numbers_that_are_no_ids_are_named(prompt, text):
    """Fails if numbers are called text, or cannot be looped over."""
    assert is_ids(prompt)
    with pytest.raises(ConfigError) as error:
        read_ids(prompt)
    assert str(error.value) == text


def test_ids_may_be_an_array_of_jax(generator):
    sampling = Sampling(max_new_tokens=2)
    [found] = generator.generate([jnp.array([3, 4])], sampling)
    assert found.ids == generator.generate([[3, 4]], sampling)[0].ids


def test_half_a_character_is_refused():
    with pytest.raises(ConfigError) as error:
        Prompts(make_bytes()).encode("a\ud800")
    text = "has half a character (a lone surrogate); remove it"
    assert str(error.value) == f"prompt='a\\ud800' {text}"


@pytest.mark.usefixtures("unfiltered")
def test_a_tokenizer_may_have_more_end_ids_than_a_request_may_name():
    """Fails if such a tokenizer refuses all requests, or an end id is passed over."""
    decoder, plain = language.make_language_model(LETTERS), make_bytes()
    sampling = Sampling(max_new_tokens=6, temperature=1.0, seed=3)
    with Generator(decoder, prompts=Prompts(plain), max_rows=4) as generator:
        [free] = generator.generate(["ab"], sampling)
    ends = dict.fromkeys([*range(9), free.ids[2]])
    record = plain.record.with_ends([*ends])
    prompts = Prompts(dataclasses.replace(plain, record=record))
    with Generator(decoder, prompts=prompts, max_rows=1) as generator:
        [text] = generator.generate(["ab"], sampling)
    first = next(n for n, x in enumerate(free.ids) if x in record.end_ids)
    assert (text.ids, text.finish_reason) == (free.ids[: first + 1], "stop")


def test_a_prompt_without_room_for_a_token_is_told_the_longest(generator):
    with pytest.raises(ConfigError) as error:
        generator.check([[1] * 15, [2] * 16])
    assert str(error.value) == (
        "prompt='[2, 2, 2, 2, 2, 2, 2' has 16 tokens, and prompt and text together "
        "have at most 16; shorten it"
    )


def test_any_number_of_prompts_is_read_as_texts_are_written(generator):
    """Fails if all prompts are held at once, or texts come in another order."""
    read = []

    def endless():
        for number in itertools.count():
            read.append(number)
            yield PROMPTS[number % len(PROMPTS)]

    wanted = generator.generate(PROMPTS, dataclasses.replace(DRAWN, num_samples=2))
    many = generator.generate_each(endless(), dataclasses.replace(DRAWN, num_samples=2))
    for number, texts in enumerate(itertools.islice(many, 9)):
        place = 2 * (number % len(PROMPTS))
        assert ids_of(texts) == ids_of(wanted[place : place + 2])
        assert [text.prompt for text in texts] == [number, number]
        assert len(read) <= number + 4 * 4 // 2
    assert len(read) > 9
    many.close()
    few = generator.generate_each(PROMPTS[:2], DRAWN)
    assert [ids_of(texts) for texts in few] == [
        [text.ids] for text in generator.generate(PROMPTS[:2], DRAWN)
    ]
    assert generator.metrics.scheduler.num_running == 0


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ConfigError) as error:
        make(max_rows=257, max_length=17)
    assert str(error.value) == (
        "max_rows=257 is not between 1 and 256; use 64\n"
        "max_length=17 is not between 0 and model.max_length=16; use 0"
    )


def test_all_numbers_that_cannot_work_are_told_at_once():
    """Fails if a number ends in an error of Python, or serves no request later."""
    config = model().config
    found = [*size_problems(config, 2.5, 1, True, -1)]
    pages = "is not 0, nor 2 or more (one page is the sink of unused rows); use 0 to "
    pages += "fill the memory"
    assert "\n".join(map(str, found)) == (
        "max_rows=2.5 is not between 1 and 256; use 64\n"
        "max_length=1 leaves no room for a token after a prompt; use 0, or 2 or more\n"
        "num_drafts=True is not between 0 and 15; use 3, or 0 for none\n"
        f"num_pages=-1 {pages}"
    )
    assert [str(x) for x in size_problems(config, 1, 0, 0, "3")] == [
        f"num_pages='3' {pages}"
    ]
    with pytest.raises(ConfigError) as error:
        make(max_rows=0, num_pages=1)
    assert str(error.value) == (
        f"max_rows=0 is not between 1 and 256; use 64\nnum_pages=1 {pages}"
    )


def test_few_programs_serve_requests_of_any_length(caplog, compiled_ahead):
    """Fails if a length of a prompt or text, or a setting, compiles a program."""
    config = dataclasses.replace(language.LLAMA, num_layers=1, vocab_size=31)
    rng = np.random.default_rng(2)
    jax.config.update("jax_log_compiles", True)
    try:
        with (
            caplog.at_level(logging.WARNING),
            compiled_ahead(),
            Generator(language.make_language_model(config), max_rows=2) as generator,
        ):
            tickets = []
            for number in range(100):
                prompt = rng.integers(0, 31, size=rng.integers(1, 12)).tolist()
                sampling = Sampling(
                    max_new_tokens=int(rng.integers(1, 5)),
                    temperature=float(rng.integers(0, 2)),
                    top_p=float(rng.uniform(0.5, 1)),
                    seed=number,
                    num_logprobs=[None, 0, 3][number % 3],
                )
                tickets.append(generator.submit(prompt, sampling))
            ends = [[*ticket][-1].finish_reason for ticket in tickets]
            assert generator.metrics.scheduler.num_live_pages == 0
    finally:
        jax.config.update("jax_log_compiles", False)
    assert set(ends) == {"length"}
    texts = [record.getMessage() for record in caplog.records]
    kinds = ("Compiling jit(run_steps)", "Compiling jit(run_pass)")
    assert len([text for text in texts if text.startswith(kinds)]) <= 5


@pytest.mark.usefixtures("greedy")
@pytest.mark.parametrize(("num_drafts", "num_programs"), [(0, 5), (3, 6)])
def test_all_programs_are_compiled_before_the_first_request(
    caplog, compiled_ahead, num_drafts, num_programs
):
    """Fails if a request has to wait for a program of a size known at the start."""
    changes = {"num_layers": 1, "vocab_size": 37 + num_drafts}
    config = dataclasses.replace(language.LLAMA, **changes)
    kinds = "Finished XLA compilation of jit(run_steps)", "of jit(run_pass)"

    def num_compiled():
        texts = [record.getMessage() for record in caplog.records]
        return len([x for x in texts if any(kind in x for kind in kinds)])

    jax.config.update("jax_log_compiles", True)
    try:
        with (
            caplog.at_level(logging.WARNING),
            compiled_ahead(),
            Generator(
                language.make_language_model(config), max_rows=4, num_drafts=num_drafts
            ) as generator,
        ):
            end = time.monotonic() + 60
            while num_compiled() < num_programs and time.monotonic() < end:
                time.sleep(0.05)
            assert num_compiled() == num_programs
            generator.generate([[1] * 9] * 4, Sampling(max_new_tokens=7))
            generator.generate(PROMPTS[:4], Sampling(max_new_tokens=4))
            generator.generate(PROMPTS[:1], Sampling(max_new_tokens=4))
    finally:
        jax.config.update("jax_log_compiles", False)
    assert num_compiled() == num_programs


def test_nothing_stays_on_the_way_when_all_texts_have_ended():
    """Fails if passes behind the last end are kept until the next request."""
    with make() as generator:
        [ended] = generator.generate([[1, 2]], Sampling(max_new_tokens=1))
        sampling = Sampling(max_new_tokens=12, end_ids=(ended.ids[0],))
        generator.generate([[1, 2]], sampling)
        engine = generator._worker._runner.engine
        for _ in range(100):
            if not engine._in_flight:
                break
            time.sleep(0.05)
        assert not engine._in_flight


def test_a_failure_reaches_all_who_wait(monkeypatch):
    """Fails if somebody waits for an engine that has died."""
    with make() as generator:
        broken = RuntimeError("no memory")

        def fail(*_):
            raise broken

        monkeypatch.setattr(generator._worker._runner.engine._passes, "read", fail)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no memory"):
                generator.generate([[1], [2]], Sampling(max_new_tokens=2))


def test_a_failure_is_told_to_each_loop_over_a_ticket(generator):
    """Fails if a second loop waits for news that nobody writes any more."""
    ticket = generator._ticket([1], [1], Sampling(), is_streamed=False)
    ticket.tell(RuntimeError("no memory"))

    async def read():
        async for _ in ticket:
            pass

    with pytest.raises(RuntimeError, match="no memory"):
        next(iter(ticket))
    with pytest.raises(RuntimeError, match="no memory"):
        asyncio.run(asyncio.wait_for(read(), timeout=10))
    with pytest.raises(RuntimeError, match="no memory"):
        next(iter(ticket))


@pytest.mark.usefixtures("unfiltered")
def test_a_text_that_cannot_be_decoded_ends_no_text_of_others():
    """Fails if a fault of the tokenizer ends the thread that all requests share."""
    decoder, prompts = language.make_language_model(LETTERS), Prompts(make_bytes())
    sampling = Sampling(max_new_tokens=6, temperature=1.0, num_samples=2)

    def fail(token):
        raise RuntimeError("no such bytes")

    with Generator(decoder, prompts=prompts, max_rows=4) as generator:
        wanted = ids_of(generator.generate(["b"], sampling))
        broken = generator._ticket("a", [97], sampling, is_streamed=False)
        broken._streams[1].write = fail
        generator._worker.add(broken)
        other = generator.submit("b", sampling)
        with pytest.raises(DataError) as error:
            list(broken)
        assert str(error.value) == (
            "sample=1 has tokens that the tokenizer cannot decode (RuntimeError: no "
            "such bytes); check the tokenizer"
        )
        found = [*other]
        ids = [[x for d in found if d.sample == n for x in d.ids] for n in (0, 1)]
        assert ids == wanted
        assert ids_of(generator.generate(["b"], sampling)) == wanted
        assert generator.metrics.scheduler.num_running == 0


def test_log_probabilities_are_fetched_if_a_request_asks(generator, monkeypatch):
    """Fails if each pass moves arrays to the host that nobody reads."""
    fetched, get = [], jax.device_get

    def watch(x):
        fetched.append(len(jax.tree.leaves(x)))
        return get(x)

    monkeypatch.setattr(jax, "device_get", watch)
    generator.generate(PROMPTS[:2], Sampling(max_new_tokens=4))
    assert {*fetched} == {1}
    fetched.clear()
    generator.generate(PROMPTS[:2], Sampling(max_new_tokens=4, num_logprobs=0))
    assert {*fetched} == {4}


def test_the_size_is_told_at_the_start(caplog):
    with caplog.at_level(logging.INFO):
        make(num_pages=9).close()
    [text] = [x.getMessage() for x in caplog.records if "text: " in x.getMessage()]
    assert text == (
        "text: 4 rows at once, of up to 16 tokens; 9 pages of 64 tokens, 73.73 kB on "
        "each device; 5 sizes of passes"
    )
