"""The experts that come with texts are those of the whole text in one forward pass."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import features, language
from tests.support.refusals import config_error
from zjax.generation import drafts
from zjax.generation.engine import Engine, Request
from zjax.generation.generator import Generator
from zjax.generation.plan import Size
from zjax.generation.pool import Pool
from zjax.generation.programs import CutDecoder
from zjax.generation.sampling import Sampling
from zjax.generation.scheduler import Scheduler
from zjax.generation.sequence import Sequence
from zjax.models.inspect import chosen_experts
from zjax.settings import schema

LENGTH, ROWS, PAGE, PAGES = 16, 3, 4, 20
TOP_K = 2
LLAMA = language.LLAMA
KERNELS = dataclasses.replace(
    LLAMA, num_layers=3, moe=schema.TokenChoice(num_experts=4, top_k=TOP_K, every=2)
)
"""Kernels choose for few tokens, as there are no groups."""
GROUPS = dataclasses.replace(
    LLAMA,
    num_layers=1,
    window=schema.SlidingWindow(size=6),
    moe=schema.TokenChoice(
        num_experts=8, top_k=TOP_K, num_shared=1, num_groups=4, top_groups=2
    ),
)
RNG = np.random.default_rng(3)
SHARED = RNG.integers(0, 29, size=16).tolist()
ASKED = [
    # Prompt, new tokens, whether the experts are wanted.
    (SHARED[:9], 7, False),
    (SHARED[:9], 6, True),
    (SHARED[:11], 5, True),
    ([*SHARED[:8], 5, 11], 6, True),
    ([3], 3, True),
    (SHARED[:13], 3, False),
    (SHARED[:13], 3, True),
    (RNG.integers(0, 29, size=11).tolist(), 5, True),
]


def experts_of(model, tokens):
    """Experts [tokens - 1, layers, K] of a text in one forward pass."""
    # One length, hence one program: no token depends on later ones.
    padded = [*tokens, *[0] * (model.config.max_length - len(tokens))]
    chosen = chosen_experts(model, {"tokens": jnp.array([padded])})
    return np.stack([np.asarray(x[0, : len(tokens) - 1]) for x in chosen], axis=1)


class Written:
    """An engine of small chunks and pages, and the experts that it tells."""

    def __init__(self, decoder, *, num_pages, chunk_size, steps=4, width=1, window=0):
        shapes = {"num_slots": ROWS, "max_length": LENGTH}
        passes = decoder.passes(num_pages=PAGES, page_size=PAGE, **shapes)
        sizes = [Size(ROWS), Size(ROWS, 2), Size(ROWS, steps=steps)]
        sizes = [*sizes[:2], Size(ROWS, width=width)] if width > 1 else sizes
        pool = Pool(num_pages, PAGE, window)
        self.scheduler = Scheduler([pool], ROWS, LENGTH, sizes, chunk_size=chunk_size)
        self.engine = Engine(passes, self.scheduler)

    def write(self, asked, *, preempts=False):
        """Returns texts with prompts, and experts; `preempts` each sequence once."""
        sequences = []
        for prompt, num_new, records in asked:
            how = {"request": Request(Sampling()), "records": records}
            salt = b"experts" if records else b""
            sequence = Sequence(prompt, num_new, salt=salt, **how)
            sequences.append(self.scheduler.add(sequence))
        found, preempted = {}, set()
        while (news := self.engine.step()) is not None:
            for each in news:
                found[each.sequence] = each.experts
            running = {*self.scheduler.shards[0].running} if preempts else set()
            for sequence in running - preempted:
                if 1 < len(sequence.generated) or sequence.num_planned > 4:
                    self.scheduler._preempt(sequence)
                    preempted.add(sequence)
        assert self.scheduler.metrics.num_live_pages == 0
        return [(sequence.tokens, found[sequence]) for sequence in sequences]


def check(model, asked, found):
    """Fails unless the experts that were asked for are of the whole text."""
    for (_, _, records), (tokens, experts) in zip(asked, found, strict=True):
        if not records:
            assert experts is None
            continue
        assert experts.dtype == np.uint8
        np.testing.assert_array_equal(experts, experts_of(model, tokens))


@pytest.mark.usefixtures("greedy")
@pytest.mark.parametrize("config", [KERNELS, GROUPS], ids=["kernels", "groups"])
def test_experts_do_not_depend_on_neighbours_chunks_pages_or_hits(config):
    """Fails if an expert is lost between chunks, steps, hits or preemptions."""
    model = language.make_language_model(config)
    decoder = CutDecoder(model)
    window = config.window_size
    plain = [(prompt, num_new, False) for prompt, num_new, _ in ASKED]
    roomy = Written(decoder, num_pages=PAGES, chunk_size=3, window=window)
    texts = [tokens for tokens, _ in roomy.write(plain)]
    narrow = Written(decoder, num_pages=9, chunk_size=5, window=window)
    for written in (roomy, roomy, narrow):
        before = written.scheduler.metrics
        found = written.write(ASKED, preempts=written is narrow)
        assert [tokens for tokens, _ in found] == texts
        check(model, ASKED, found)
        hits = written.scheduler.metrics.num_hit_tokens - before.num_hit_tokens
        assert hits > 8 or window
    assert narrow.scheduler.metrics.num_preemptions > 3


@pytest.mark.usefixtures("greedy")
def test_drafts_that_are_wrong_leave_no_expert(monkeypatch):
    """Fails if experts of a rejected draft stay, or tokens of a lane are mixed up."""
    monkeypatch.setattr(drafts, "MIN_GAIN", 0.0)
    model = language.make_language_model(KERNELS)
    asked = [([*SHARED[:4], *SHARED[:4]], 8, True), ([7, 7, 7, 7], 9, True)]
    written = Written(CutDecoder(model), num_pages=PAGES, chunk_size=3, width=3)
    check(model, asked, written.write(asked))
    metrics = written.scheduler.metrics
    assert metrics.num_drafts > metrics.num_accepted_drafts


@pytest.mark.usefixtures("unfiltered")
def test_experts_come_with_texts_and_are_told(caplog, compiled_ahead):
    """Fails if others pay for experts, or a text that ends early has other experts."""
    model = language.make_language_model(KERNELS)
    prompts = [SHARED[:5], SHARED[:9]]
    drawn = Sampling(max_new_tokens=5, temperature=1.5, num_samples=2, seed=3)
    told = "text: compiling the passes that return experts, for the first request with "
    told += "experts"

    def count(start):
        texts = [record.getMessage() for record in caplog.records]
        return len([text for text in texts if text.startswith(start)])

    kinds = "Compiling jit(run_steps)", "Compiling jit(run_pass)"
    jax.config.update("jax_log_compiles", True)
    try:
        with (
            caplog.at_level(logging.INFO),
            compiled_ahead(),
            Generator(model, max_rows=1) as generator,
        ):
            plain = generator.generate(prompts, drawn)
            assert {text.experts for text in plain} == {None}
            assert count(told) == 0
            number = count(kinds)
            asking = dataclasses.replace(drawn, experts=True)
            texts = generator.generate(prompts, asking)
            assert number < count(kinds) <= 2 * number
            number = count(kinds)
            ending = dataclasses.replace(asking, end_ids=(plain[0].ids[2],))
            ended = generator.generate(prompts, ending)
            assert (count(kinds), count(told)) == (number, 1)
    finally:
        jax.config.update("jax_log_compiles", False)
    assert [text.ids for text in texts] == [text.ids for text in plain]
    assert len(ended[0].ids) <= 3
    for text in (*texts, *ended):
        wanted = experts_of(model, [*text.prompt_ids, *text.ids])
        np.testing.assert_array_equal(text.experts, wanted)


@functools.cache
def model_of_one_device():
    """The model of a run: first values depend on the seed alone."""
    alone = features.config_of(features.LLAMA + features.EXPERTS + "mesh.data=1")
    run = features.start(alone, 1)
    return run.bind(run.state)


@pytest.mark.usefixtures("greedy")
@pytest.mark.parametrize(
    "settings",
    [
        "mesh.data=2 mesh.tensor=2 mesh.expert=2",
        features.HOST + "zero.stage=2 mesh.data=2",
    ],
    ids=["tensor and expert", "host"],
)
def test_experts_do_not_depend_on_the_mesh(settings):
    config = features.config_of(features.LLAMA + features.EXPERTS + settings)
    run = features.start(config, features.num_devices(config))
    prompts = [SHARED[:5], SHARED[:9], SHARED[:3]]
    with Generator(run, run.state, max_rows=2) as generator:
        sampling = Sampling(max_new_tokens=3, experts=True)
        texts = generator.generate(prompts, sampling)
    for text in texts:
        wanted = experts_of(model_of_one_device(), [*text.prompt_ids, *text.ids])
        np.testing.assert_array_equal(text.experts, wanted)


def test_experts_of_a_model_without_are_refused():
    with (
        Generator(language.make_language_model(LLAMA), max_rows=1) as generator,
        config_error("experts=True asks a model that has none; leave it False"),
    ):
        generator.check([[3]], Sampling(experts=True))
