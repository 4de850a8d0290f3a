"""Texts with drafts are the texts without, in fewer passes where they repeat."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

from tests.support import features, language
from zjax.data.prompts import Prompts
from zjax.data.tokenizer import make_bytes
from zjax.errors import ConfigError
from zjax.generation import drafts
from zjax.generation.engine import Engine, Request
from zjax.generation.generate import stored
from zjax.generation.generator import Generator
from zjax.generation.plan import Size
from zjax.generation.pool import Pool
from zjax.generation.programs import CutDecoder
from zjax.generation.sampling import Sampling
from zjax.generation.scheduler import Scheduler
from zjax.generation.sequence import Sequence
from zjax.generation.shards import num_shards
from zjax.generation.sizes import sizes_of
from zjax.settings import schema

LENGTH, PAGE, PAGES = 200, 16, 80
LONG = " mesh.data=8 model.max_length=64"
CONFIG = dataclasses.replace(language.LLAMA, max_length=LENGTH)
RNG = np.random.default_rng(4)
PROMPTS = [RNG.integers(0, 29, size=n).tolist() for n in (5, 40, 9, 23)]
PROMPTS.append([*PROMPTS[1][:35], 3])
DRAWN = Sampling(max_new_tokens=60, temperature=0.7, top_p=0.9, seed=5)
PENALISED = Sampling(max_new_tokens=60, frequency_penalty=0.1, presence_penalty=0.2)


@functools.cache
def decoder():
    return CutDecoder(language.make_language_model(CONFIG))


@functools.cache
def circular():
    """A decoder that sees few tokens, so that its likely texts go round in circles."""
    config = dataclasses.replace(CONFIG, window=schema.SlidingWindow(size=2))
    return CutDecoder(language.make_language_model(config))


class Written:
    """An engine that counts the passes through the model, and what it writes.

    The cache has one shape, so that engines of fewer pages share programs.
    """

    def __init__(self, decoder, width, *, num_rows=4, num_pages=PAGES, most=LENGTH):
        shapes = {"num_slots": num_rows, "max_length": most}
        passes = decoder.passes(num_pages=PAGES, page_size=PAGE, **shapes)
        sizes = [Size(num_rows), Size(num_rows, 2)]
        sizes += [Size(num_rows, width=width)] if width > 1 else []
        pools = [Pool(num_pages, PAGE) for _ in range(num_shards(decoder.axes))]
        self.scheduler = Scheduler(pools, num_rows, most, sizes, chunk_size=8)
        self.engine = Engine(passes, self.scheduler, axes=decoder.axes)
        self.num_passes = self.num_drafted = 0
        plan = self.scheduler.plan

        def count():
            planned = plan()
            if planned is not None:
                self.num_passes += planned.size.steps
                self.num_drafted += planned.size.width > 1
            return planned

        self.scheduler.plan = count

    def write(self, requests):
        """Returns the tokens of requests of a prompt and settings, and all news."""
        sequences = [
            self.scheduler.add(
                Sequence(prompt, sampling.max_new_tokens, request=Request(sampling))
            )
            for prompt, sampling in requests
        ]
        news = [*self.engine.run()]
        assert self.scheduler.metrics.num_live_pages == 0
        return [sequence.generated for sequence in sequences], news


@pytest.fixture
def always(monkeypatch):
    """Has drafts read wherever there are some, right or wrong."""
    monkeypatch.setattr(drafts, "MIN_GAIN", 0.0)


def requests_of(sampling):
    return [
        (prompt, dataclasses.replace(sampling, seed=number))
        for number, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize(
    "sampling",
    [Sampling(max_new_tokens=60), DRAWN, PENALISED],
    ids=["greedy", "drawn", "penalised"],
)
def test_texts_are_those_without_drafts(sampling, always):
    """Fails if a wrong draft is kept, or a right one moves the next position."""
    plain, drafted = (Written(decoder(), width) for width in (1, 4))
    requests = requests_of(sampling)
    wanted, _ = plain.write(requests)
    assert drafted.write(requests)[0] == wanted
    hits = drafted.scheduler.metrics.num_hit_tokens
    assert drafted.write(requests[::-1])[0] == wanted[::-1]
    assert drafted.scheduler.metrics.num_hit_tokens > hits + 2 * PAGE
    metrics = drafted.scheduler.metrics
    assert 0 < metrics.num_accepted_drafts < metrics.num_drafts
    # Texts of requests alone, with a width of their own.
    alone = Written(decoder(), 8, num_rows=1)
    for request, text in zip(requests, wanted, strict=True):
        assert alone.write([request])[0] == [text]


def test_texts_are_those_without_drafts_where_pages_run_out(always):
    """Fails if a row that gives its pages away counts its drafts as tokens."""
    requests = requests_of(Sampling(max_new_tokens=60))
    wanted, _ = Written(decoder(), 1).write(requests)
    narrow = Written(decoder(), 4, num_pages=14)
    assert narrow.write(requests)[0] == wanted
    assert narrow.scheduler.metrics.num_preemptions > 0


def test_log_probabilities_are_those_without_drafts(always):
    """Fails if a position of several in a pass has the numbers of another."""
    sampling = Sampling(max_new_tokens=40, num_logprobs=2)
    found = []
    for width in (1, 4):
        _, news = Written(decoder(), width, num_rows=1).write([(PROMPTS[0], sampling)])
        fields = zip(*(each[2:5] for each in news), strict=True)
        found.append([np.concatenate(field) for field in fields])
        lengths = {len(each.tokens) for each in news}
        assert width == 1 or lengths & {2, 3, 4}
    plain, drafted = found
    np.testing.assert_allclose(plain[0], drafted[0], atol=1e-4)
    np.testing.assert_array_equal(plain[1][:, :2], drafted[1][:, :2])
    np.testing.assert_allclose(plain[2][:, :2], drafted[2][:, :2], atol=1e-4)


@pytest.mark.usefixtures("greedy")
@pytest.mark.parametrize("num_rows", [1, 4])
def test_texts_that_repeat_take_fewer_passes(num_rows):
    """Fails if nothing is drafted, or no draft is right."""
    requests = [(prompt, Sampling(max_new_tokens=140)) for prompt in PROMPTS[:num_rows]]
    plain, drafted = (Written(circular(), x, num_rows=num_rows) for x in (1, 4))
    assert plain.write(requests)[0] == drafted.write(requests)[0]
    assert 1.5 * drafted.num_passes < plain.num_passes
    metrics = drafted.scheduler.metrics
    assert metrics.num_accepted_drafts > 0.7 * metrics.num_drafts


@pytest.mark.usefixtures("unfiltered")
def test_texts_that_do_not_repeat_take_no_more_passes():
    """Fails if drafts are tried, or waited for, where they are seldom right."""
    config = dataclasses.replace(CONFIG, num_layers=1, vocab_size=997)
    wide = CutDecoder(language.make_language_model(config))
    sampling = Sampling(max_new_tokens=150, temperature=3.0)
    plain, drafted = (Written(wide, width) for width in (1, 4))
    assert (
        plain.write(requests_of(sampling))[0]
        == (drafted.write(requests_of(sampling))[0])
    )
    assert drafted.num_drafted == 0
    assert drafted.num_passes == plain.num_passes


def test_a_text_that_stops_to_repeat_stops_to_read_drafts():
    """Fails if drafts that are wrong are read again and again."""
    circle = Sampling(max_new_tokens=150, temperature=0.01)
    # The seed has no part in what a cold row draws; hot rows draw at random.
    cold, hot = (PROMPTS[0], circle), dataclasses.replace(circle, temperature=20.0)
    drafted = Written(decoder(), 4, num_rows=1)
    drafted.write([cold])
    num_drafted, num_passes = drafted.num_drafted, drafted.num_passes
    assert num_drafted > 10
    # Earlier texts of the prompt are proposed, and seldom right.
    drafted.write([(PROMPTS[0], hot)])
    assert drafted.num_drafted - num_drafted < 0.2 * (drafted.num_passes - num_passes)


def test_later_requests_of_a_prompt_profit_from_the_first():
    """Fails if the texts of a prompt are forgotten with the request."""
    requests = [(PROMPTS[3], dataclasses.replace(PENALISED, frequency_penalty=0.6))]
    drafted, passes = Written(decoder(), 8, num_rows=1), []
    for _ in range(2):
        before = drafted.num_passes
        drafted.write(requests)
        passes.append(drafted.num_passes - before)
    assert passes[0] > 1.5 * passes[1]


@pytest.mark.usefixtures("unfiltered")
def test_texts_end_within_drafts(always):
    """Fails if tokens behind an end id or a stop string are kept."""
    letters = dataclasses.replace(CONFIG, num_layers=1, vocab_size=257)
    model, prompts = language.make_language_model(letters), Prompts(make_bytes())
    sampling = Sampling(max_new_tokens=60, temperature=0.5, seed=3)
    options = {"prompts": prompts, "max_rows": 1}
    with (
        Generator(model, **options) as plain,
        Generator(model, num_drafts=5, **options) as drafted,
    ):
        [free] = plain.generate(["ab" * 8], sampling)
        shown = [i for i, x in enumerate(free.ids) if x < 128]
        starts = [i for i, j in itertools.pairwise(shown) if j == i + 1]
        for start in starts[:: max(len(starts) // 6, 1)]:
            stop = bytes(free.ids[start : start + 2]).decode()
            for ends in ({"stop": (stop,)}, {"end_ids": (free.ids[start],)}):
                ended = dataclasses.replace(sampling, **ends)
                [wanted] = plain.generate(["ab" * 8], ended)
                assert wanted.finish_reason == "stop"
                assert drafted.generate(["ab" * 8], ended) == [wanted]
                news = [*drafted.stream("ab" * 8, ended)]
                assert "".join(delta.text for delta in news) == wanted.text
        served = drafted.metrics.scheduler
        assert served.num_accepted_drafts > 0 and served.num_live_pages == 0
        assert plain.metrics.scheduler.num_drafts == 0


@pytest.mark.usefixtures("greedy")
@pytest.mark.parametrize(
    "settings",
    [
        "mesh.data=4 mesh.tensor=2 model.num_layers=2",
        features.EXPERTS + "mesh.data=4 mesh.expert=2 model.num_layers=2",
        features.HOST + "zero.stage=2 mesh.data=8",
    ],
    ids=["tensor", "experts", "host"],
)
def test_meshes_and_offloaded_blocks_read_drafts(settings, always):
    run = features.start(features.config_of(settings + " model.max_length=64"))
    most, num_new = run.config.model.max_length, 20
    prompts = [[1, 2, 3, 1, 2], [4, 0, 4]]
    requests = [(prompt, Sampling(max_new_tokens=num_new)) for prompt in prompts]
    with jax.set_mesh(run.mesh):
        drafted = Written(stored(run.decoder(run.state)), 4, num_rows=2, most=most)
        texts, _ = drafted.write(requests)
    wanted = [(prompt, num_new) for prompt in prompts]
    assert texts == language.likely_texts(run.bind(run.state), wanted, most)
    assert drafted.scheduler.metrics.num_accepted_drafts > 0


def test_offloaded_blocks_come_up_less_often_where_texts_repeat(monkeypatch):
    """Fails if a pass of drafts fetches all blocks for each token."""
    run = features.start(features.config_of(features.HOST + LONG))
    programs, passes = run.step.executor.generation, []
    embed = programs.embed
    monkeypatch.setattr(programs, "embed", lambda *x: passes.append(1) or embed(*x))
    request, counts = ([1, 2, 3] * 4, Sampling(max_new_tokens=52)), []
    for width in (1, 4):
        with jax.set_mesh(run.mesh):
            Written(run.decoder(run.state), width, num_rows=1, most=64).write([request])
        counts.append(len(passes) - sum(counts))
    assert 1.3 * counts[1] < counts[0]


@pytest.mark.parametrize("max_rows", [1, 4, 64, 256])
def test_drafts_add_two_sizes_at_most(max_rows):
    for num_drafts in range(16):
        sizes = sizes_of(max_rows, num_drafts)
        added = [size for size in sizes if size.width > 1]
        assert len(sizes) - len(added) <= 6 and len(added) <= 2
        assert sizes[: len(sizes) - len(added)] == sizes_of(max_rows)
        assert {size.width for size in added} <= {num_drafts + 1}
        assert max((x.lanes * x.width for x in added), default=0) <= 256


def test_numbers_of_drafts_out_of_range_are_refused():
    with pytest.raises(ConfigError) as error:
        Generator(language.make_language_model(language.LLAMA), num_drafts=16)
    assert str(error.value) == (
        "num_drafts=16 is not between 0 and 15; use 3, or 0 for none"
    )
