"""Log-probabilities of prompts are those of the whole text in one forward pass."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import features, language
from tests.support.refusals import config_error
from zjax.data.prompts import Prompts
from zjax.data.tokenizer import make_bytes
from zjax.generation.engine import Engine, Request
from zjax.generation.generator import Generator
from zjax.generation.plan import Size
from zjax.generation.pool import Pool
from zjax.generation.programs import CutDecoder
from zjax.generation.sampling import Sampling
from zjax.generation.scheduler import Scheduler
from zjax.generation.sequence import Sequence
from zjax.settings import schema

LENGTH, ROWS, PAGE, PAGES = 16, 3, 4, 20
LLAMA = language.LLAMA
FAMILIES = {
    "gpt": language.GPT,
    "latents": dataclasses.replace(language.LATENT, num_layers=1),
    "experts, a capped head": dataclasses.replace(
        LLAMA,
        num_layers=1,
        norm_position="both",
        zero_centered_norm=True,
        logit_soft_cap=3.0,
        moe=schema.TokenChoice(num_experts=4, top_k=2, num_shared=1),
    ),
}
RNG = np.random.default_rng(3)
SHARED = RNG.integers(0, 29, size=16).tolist()
ASKED = [
    # Prompt, new tokens, most likely tokens of the prompt.
    (SHARED[:9], 7, None),
    (SHARED[:9], 4, 2),
    (SHARED, 0, 3),
    ([*SHARED[:8], 5, 11], 6, 0),
    ([7], 0, 1),
    ([3], 3, 2),
    (SHARED[:4], 0, 0),
    (SHARED[:13], 3, None),
    (RNG.integers(0, 29, size=11).tolist(), 5, 1),
]


def scores_of(model, tokens):
    """Log-probabilities of all tokens behind each token of a text."""
    logits = language.logits_of(model, {"tokens": jnp.array([tokens])})[0]
    return np.asarray(jax.nn.log_softmax(logits.astype(jnp.float32)))


def check(scores, prompt, logprobs, best):
    """Fails unless scores of a prompt are those of one forward pass."""
    assert len(logprobs) == len(prompt)
    assert logprobs[0] is None
    wanted = scores[np.arange(len(prompt) - 1), prompt[1:]]
    np.testing.assert_allclose(logprobs[1:], wanted, atol=2e-5, rtol=0)
    for place, found in enumerate(best[1:]):
        # The order of two tokens that are about as likely may be another.
        order = np.argsort(-scores[place])[: len(found)]
        for values in (scores[place][[*found]], [*found.values()]):
            np.testing.assert_allclose(values, scores[place][order], atol=2e-5, rtol=0)


class Written:
    """An engine of small chunks and pages, and what it tells of prompts.

    The cache has one shape, so that engines of fewer pages share programs.
    """

    def __init__(self, decoder, *, num_pages, chunk_size):
        shapes = {"num_slots": ROWS, "max_length": LENGTH}
        passes = decoder.passes(num_pages=PAGES, page_size=PAGE, **shapes)
        sizes = [Size(ROWS, 2), Size(ROWS, steps=4)]
        pool = Pool(num_pages, PAGE)
        self.scheduler = Scheduler([pool], ROWS, LENGTH, sizes, chunk_size=chunk_size)
        self.engine = Engine(passes, self.scheduler)

    def write(self, asked, *, preempts=False):
        """Returns the texts, with log-probabilities and most likely tokens.

        `preempts` takes the pages of each prompt once, with a part of the scores there.
        """
        found = {}
        for prompt, num_new, num_best in asked:
            request = Request(Sampling(prompt_logprobs=num_best))
            settings = {"prompt_logprobs": num_best, "request": request}
            sequence = self.scheduler.add(Sequence(prompt, num_new, **settings))
            found[sequence] = [None], [None]
        preempted = set()
        while (news := self.engine.step()) is not None:
            for each in news:
                if each.prompt is not None:
                    logprobs, best = found[each.sequence]
                    logprobs += each.prompt.logprobs.tolist()
                    best += pairs(each.prompt, each.sequence.prompt_logprobs)
            running = {*self.scheduler.shards[0].running} if preempts else set()
            for sequence in running - preempted:
                if 0 < sequence.num_scored < len(sequence.prompt):
                    self.scheduler._preempt(sequence)
                    preempted.add(sequence)
        assert self.scheduler.metrics.num_live_pages == 0
        return [(sequence.generated, *each) for sequence, each in found.items()]


def pairs(scores, number):
    """The most likely tokens of each place with log-probabilities."""
    places = zip(scores.best_ids, scores.best_logprobs, strict=True)
    return [
        dict(zip(ids[:number].tolist(), values[:number].tolist(), strict=True))
        for ids, values in places
    ]


@pytest.mark.usefixtures("greedy")
@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_scores_do_not_depend_on_neighbours_chunks_pages_or_hits(config):
    """Fails if a score is lost between chunks or preemptions, or is of other keys."""
    model = language.make_language_model(config)
    decoder = CutDecoder(model)
    scores = [scores_of(model, prompt) for prompt, _, _ in ASKED]
    plain = [(prompt, num_new, None) for prompt, num_new, _ in ASKED if num_new]
    texts = iter(Written(decoder, num_pages=PAGES, chunk_size=3).write(plain))
    wanted = [next(texts)[0] if num_new else [] for _, num_new, _ in ASKED]
    roomy = Written(decoder, num_pages=PAGES, chunk_size=3)
    narrow = Written(decoder, num_pages=9, chunk_size=3)
    for written in (roomy, roomy, narrow):
        found = written.write(ASKED, preempts=written is narrow)
        assert [text for text, _, _ in found] == wanted
        for (prompt, _, num_best), (_, *given), expected in zip(
            ASKED, found, scores, strict=True
        ):
            if num_best is None:
                assert given == [[None], [None]]
            else:
                check(expected, prompt, *given)
                assert {len(best) for best in given[1][1:]} <= {num_best}
    assert roomy.scheduler.metrics.num_hit_tokens > 8
    assert narrow.scheduler.metrics.num_preemptions > 3


@functools.cache
def long_model():
    config = dataclasses.replace(LLAMA, num_layers=1, max_length=160)
    return language.make_language_model(config)


@pytest.fixture(scope="module")
def generator():
    with Generator(long_model(), max_rows=4) as generator:
        yield generator


PROMPTS = [RNG.integers(0, 29, size=n).tolist() for n in (150, 64, 65, 1, 2, 160, 63)]


def check_text(text, prompt, num_best, model=None):
    """Fails unless a text has the scores of its prompt."""
    assert text.prompt_ids == prompt
    best = text.prompt_best if num_best else [None, *({} for _ in prompt[1:])]
    assert best[0] is None and len(best) == len(prompt)
    assert {len(x) for x in best[1:]} <= {num_best}
    check(scores_of(model or long_model(), prompt), prompt, text.prompt_logprobs, best)


def test_a_prompt_alone_is_scored(generator):
    """Fails if a prompt that fills the model is refused, or a token is written."""
    sampling = Sampling(prompt_logprobs=3)
    for prompt, text in zip(
        PROMPTS, generator.generate(PROMPTS, sampling), strict=True
    ):
        assert (text.ids, text.text, text.finish_reason) == ([], "", "length")
        check_text(text, prompt, 3)
    assert generator.metrics.scheduler.num_live_pages == 0


def test_scores_stand_beside_drawn_texts(generator):
    """Fails if temperature, filters or a hit of an equal prompt change a score."""
    drawn = {"max_new_tokens": 6, "temperature": 1.3, "top_k": 4, "seed": 3}
    drawn |= {"num_samples": 2, "forbidden_ids": (PROMPTS[0][1],)}
    plain = generator.generate(PROMPTS[:3], Sampling(**drawn))
    assert {text.prompt_logprobs for text in plain} == {None}
    assert [x.prompt_ids for x in plain[::2]] == [[*x] for x in PROMPTS[:3]]
    hits = generator.metrics.scheduler.num_hit_tokens
    found = generator.generate(PROMPTS[:3], Sampling(prompt_logprobs=0, **drawn))
    assert [text.ids for text in found] == [text.ids for text in plain]
    for text in found:
        check_text(text, PROMPTS[text.prompt], 0)
        assert text.prompt_best is None
    # Of the samples that follow the first of each prompt.
    assert generator.metrics.scheduler.num_hit_tokens == hits + 128 + 0 + 64


def test_scores_come_before_the_text(generator):
    """Fails if a reader of a stream has to sort what comes."""
    sampling = Sampling(
        max_new_tokens=3, temperature=1.0, num_samples=3, prompt_logprobs=1
    )
    deltas = [*generator.stream(PROMPTS[0], sampling)]
    scored = [n for n, x in enumerate(deltas) if x.prompt is not None]
    written = [n for n, x in enumerate(deltas) if x.ids]
    assert {deltas[n].sample for n in scored} == {0}
    assert max(scored) <= min(written)
    logprobs = np.concatenate([deltas[n].prompt.logprobs for n in scored])
    best = np.concatenate([deltas[n].prompt.best_ids for n in scored])
    assert (len(logprobs), best.shape) == (149, (149, 1))


@pytest.mark.usefixtures("greedy")
def test_scores_are_the_same_where_pages_run_out():
    """Fails if a prompt that gives its pages away loses scores, or gets some twice."""
    sampling = Sampling(max_new_tokens=70, prompt_logprobs=2)
    prompts = [prompt[:80] for prompt in PROMPTS[:3]]
    with Generator(long_model(), max_rows=4, num_pages=5) as generator:
        for prompt, text in zip(
            prompts, generator.generate(prompts, sampling), strict=True
        ):
            check_text(text, prompt, 2)
            assert len(text.ids) == 70
        assert generator.metrics.scheduler.num_preemptions > 0


@pytest.mark.usefixtures("greedy")
@pytest.mark.parametrize(
    "settings",
    [
        "mesh.data=4 mesh.tensor=2",
        "zero.stage=3 mesh.data=8",
        features.HOST + "zero.stage=2 mesh.data=8",
    ],
    ids=["tensor", "stage 3", "host"],
)
def test_scores_do_not_depend_on_the_mesh(settings):
    run = features.start(features.config_of(settings))
    prompts = [prompt[:15] for prompt in PROMPTS[:3]]
    with Generator(run, run.state, max_rows=2) as generator:
        found = generator.generate(prompts, Sampling(prompt_logprobs=2))
    model = run.bind(run.state)
    for prompt, text in zip(prompts, found, strict=True):
        check_text(text, prompt, 2, model)


@pytest.mark.usefixtures("greedy")
def test_the_program_that_scores_is_one_more_and_is_told(caplog, compiled_ahead):
    """Fails if others pay for scores, or each request compiles a program."""
    config = dataclasses.replace(LLAMA, num_layers=1, vocab_size=41, max_length=160)
    kinds = "Compiling jit(run_steps)", "Compiling jit(run_pass)"
    told = "text: compiling the pass that scores prompts, for the first request with "

    def count(start):
        texts = [record.getMessage() for record in caplog.records]
        return len([text for text in texts if text.startswith(start)])

    jax.config.update("jax_log_compiles", True)
    try:
        with (
            caplog.at_level(logging.INFO),
            compiled_ahead(),
            Generator(language.make_language_model(config), max_rows=1) as generator,
        ):
            generator.generate(PROMPTS[:4], Sampling(max_new_tokens=3))
            assert (count(kinds), count(told)) == (3, 0)
            for num_best in (0, 3):
                sampling = Sampling(max_new_tokens=3, prompt_logprobs=num_best)
                generator.generate(PROMPTS[:4], sampling)
                generator.generate(PROMPTS, Sampling(prompt_logprobs=num_best))
            assert (count(kinds), count(told)) == (4, 1)
    finally:
        jax.config.update("jax_log_compiles", False)


def test_scores_are_moved_to_the_host_if_a_prompt_asks(generator, monkeypatch):
    """Fails if each pass of a text moves arrays that nobody reads."""
    fetched, get = [], jax.device_get

    def watch(x):
        fetched.append(len(jax.tree.leaves(x)))
        return get(x)

    monkeypatch.setattr(jax, "device_get", watch)
    generator.generate(PROMPTS[1:2], Sampling(max_new_tokens=20, prompt_logprobs=0))
    assert sorted(fetched)[-2:] == [1, 4] and sorted(fetched)[0] == 1


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs=21 is not between 0 and 20; use "
         "None for no log-probabilities"),
        ({"min_new_tokens": 2}, "min_new_tokens=2 is above max_new_tokens=0; use at "
         "most 0"),
        ({"num_samples": 2, "temperature": 1.0}, "num_samples=2 would be empty texts "
         "at max_new_tokens=0; use 1"),
    ],
)  # fmt: skip
def test_what_scores_nothing_is_refused(generator, settings, told):
    sampling = Sampling(**({"prompt_logprobs": 0} | settings))
    with config_error(told):
        generator.generate([[1, 2]], sampling)


@pytest.mark.parametrize(
    ("length", "settings", "told"),
    [
        (161, {}, "prompt='[1, 1, 1, 1, 1, 1, 1' has 161 tokens, and prompt and text "
         "together have at most 160; shorten it"),
        (160, {"prompt_logprobs": None}, "prompt='[1, 1, 1, 1, 1, 1, 1' has 160 "
         "tokens, and prompt and text together have at most 160; shorten it"),
        (159, {"max_new_tokens": 2}, "max_new_tokens=2 after 159 tokens is more than "
         "160; ask for 1 or fewer, or shorten the prompt"),
    ],
)  # fmt: skip
def test_prompts_that_are_too_long_are_refused(generator, length, settings, told):
    """Fails if a prompt that is scored alone may be longer than the longest text."""
    with config_error(told):
        sampling = Sampling(**({"prompt_logprobs": 0} | settings))
        generator.generate([[1] * length], sampling)


@pytest.mark.usefixtures("greedy")
def test_half_a_character_at_the_end_of_a_prompt_is_not_written():
    """Fails if the text of a prompt that is scored alone has the end of the prompt."""
    config = dataclasses.replace(LLAMA, num_layers=1, vocab_size=257)
    model, prompts = language.make_language_model(config), Prompts(make_bytes())
    with Generator(model, prompts=prompts, max_rows=1) as generator:
        prompt = [*"aé".encode()][:2]
        [text] = generator.generate([prompt], Sampling(prompt_logprobs=0))
    assert text.text == ""
