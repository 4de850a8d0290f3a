"""Greedy texts are those of the whole model, however requests share passes, pages."""

import dataclasses

import numpy as np
import pytest

from tests.support import features, language
from tests.support.refusals import config_error
from zjax.generation import drafts
from zjax.generation.engine import Engine, Request
from zjax.generation.plan import Size
from zjax.generation.pool import Pool
from zjax.generation.programs import CutDecoder
from zjax.generation.scheduler import Scheduler
from zjax.generation.sequence import Sequence
from zjax.settings import schema

LENGTH, ROWS, PAGE, PAGES = 16, 3, 4, 20
LLAMA, LATENTS = language.LLAMA, features.MODELS["latents"]
FAMILIES = {
    "gpt": language.GPT,
    "llama": LLAMA,
    "latents": language.LATENT,
    "window": dataclasses.replace(LLAMA, window=schema.SlidingWindow(size=3)),
    "gates, caps, sinks and norms of heads": dataclasses.replace(
        language.QWEN3,
        activation="geglu",
        norm_position="both",
        zero_centered_norm=True,
        attention_soft_cap=2.0,
        logit_soft_cap=3.0,
        attention_sinks=True,
    ),
    "experts alone": dataclasses.replace(
        LLAMA,
        moe=schema.TokenChoice(num_experts=6, top_k=3, expert_size=12, normalise=False),
    ),
    "groups of experts": dataclasses.replace(
        LLAMA,
        moe=schema.TokenChoice(
            num_experts=8,
            top_k=2,
            num_shared=1,
            num_groups=4,
            top_groups=2,
            scores="sigmoid",
        ),
    ),
    "experts with biases": dataclasses.replace(
        language.GPT, moe=schema.TokenChoice(num_experts=4, top_k=2)
    ),
    "tiles": dataclasses.replace(language.GPT, mlp_tiles=2),
    "a layer without rotation": dataclasses.replace(
        LLAMA, positions=schema.Rotary(unrotated_every=2)
    ),
}
DEEP = {
    "gpt",
    "llama",
    "latents",
    "window",
    "experts alone",
    "groups of experts",
    "a layer without rotation",
}
"""Families of two layers: one is enough of all others."""
FAMILIES = {
    name: config if name in DEEP else dataclasses.replace(config, num_layers=1)
    for name, config in FAMILIES.items()
}
TWO_LAYERS = "model.num_layers=2 "
"""The first and the last: those from the host have one between them."""
RNG = np.random.default_rng(3)
SHARED = RNG.integers(0, 29, size=9).tolist()
PROMPTS = [
    SHARED,
    [*SHARED[:8], 5, 11],
    RNG.integers(0, 29, size=2).tolist(),
    RNG.integers(0, 29, size=7).tolist(),
    SHARED[:5],
]
WANTED = [7, 6, 12, 9, 10]
"""New tokens of each prompt."""
REQUESTS = [*zip(PROMPTS, WANTED, strict=True)]
SEVERAL_CHUNK_SIZES = {"gpt", "llama", "latents", "window"}
"""Families with a program for longer chunks: forms of keys, with and without biases."""


class Written:
    """An engine of small chunks and pages, and what it writes.

    The cache has one shape, so that engines of fewer pages share programs.
    """

    def __init__(self, decoder, *, num_pages, chunk_size, width=1, window=0):
        shapes = {"num_slots": ROWS, "max_length": LENGTH}
        passes = decoder.passes(num_pages=PAGES, page_size=PAGE, **shapes)
        sizes = [Size(ROWS), Size(ROWS, 2), Size(ROWS, steps=4)]
        sizes += [Size(ROWS, width=width)] if width > 1 else []
        pool = Pool(num_pages, PAGE, window)
        self.scheduler = Scheduler([pool], ROWS, LENGTH, sizes, chunk_size=chunk_size)
        self.engine = Engine(passes, self.scheduler)

    def write(self):
        """Returns the texts of all prompts."""
        sequences = [
            self.scheduler.add(Sequence(prompt, num_new, request=Request()))
            for prompt, num_new in REQUESTS
        ]
        for _ in self.engine.run():
            pass
        assert self.scheduler.metrics.num_live_pages == 0
        return [sequence.generated for sequence in sequences]


@pytest.mark.usefixtures("greedy")
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_do_not_depend_on_neighbours_chunks_pages_or_hits(family, monkeypatch):
    """Fails if a key is lost between chunks, pages, owners of pages, or prefixes.

    Or if drafts, of which most are wrong, leave keys behind.
    """
    model = language.make_language_model(FAMILIES[family])
    wanted, decoder = language.likely_texts(model, REQUESTS, LENGTH), CutDecoder(model)
    longer = 8 if family in SEVERAL_CHUNK_SIZES else 3
    assert len({token for text in wanted for token in text}) > 3
    roomy = Written(decoder, num_pages=PAGES, chunk_size=3)
    assert roomy.write() == wanted
    hits = roomy.scheduler.metrics.num_hit_tokens
    assert roomy.write() == wanted
    assert roomy.scheduler.metrics.num_hit_tokens > hits + 8
    narrow = Written(decoder, num_pages=7, chunk_size=longer)
    assert narrow.write() == wanted
    assert narrow.scheduler.metrics.num_preemptions > 0
    monkeypatch.setattr(drafts, "MIN_GAIN", 0.0)
    drafted = Written(decoder, num_pages=7, chunk_size=longer, width=4)
    assert drafted.write() == wanted
    metrics = drafted.scheduler.metrics
    assert metrics.num_preemptions > 0
    assert metrics.num_drafts > metrics.num_accepted_drafts


@pytest.mark.usefixtures("greedy")
def test_texts_are_the_same_where_pages_behind_a_window_are_free(monkeypatch):
    """Fails if a page that a token sees is freed, or a program reads one that was."""
    config = FAMILIES["window"]
    model, window = language.make_language_model(config), config.window.size
    wanted, decoder = language.likely_texts(model, REQUESTS, LENGTH), CutDecoder(model)
    with config_error(
        "max_new_tokens=7 after 9 tokens needs 4 pages of 4 tokens, and the cache has "
        "3; ask for fewer, shorten the prompt, or enlarge the cache"
    ):
        Written(decoder, num_pages=4, chunk_size=3).write()
    freed = Written(decoder, num_pages=4, chunk_size=3, window=window)
    assert freed.write() == wanted
    roomy = Written(decoder, num_pages=PAGES, chunk_size=3, window=window)
    assert roomy.write() == roomy.write() == wanted
    assert roomy.scheduler.metrics.num_hit_tokens > 8
    monkeypatch.setattr(drafts, "MIN_GAIN", 0.0)
    tight = Written(decoder, num_pages=5, chunk_size=3, width=4, window=window)
    assert tight.write() == wanted
    assert tight.scheduler.metrics.num_drafts > 0


@pytest.mark.usefixtures("greedy")
@pytest.mark.parametrize(
    "settings",
    [
        TWO_LAYERS + "mesh.data=4 mesh.tensor=2",
        TWO_LAYERS + "zero.stage=3 mesh.data=8",
        TWO_LAYERS + features.EXPERTS + "mesh.data=2 mesh.expert=2 mesh.tensor=2",
        features.HOST + "zero.stage=2 mesh.data=8",
        TWO_LAYERS + LATENTS + "mesh.data=2 mesh.tensor=4",
        LATENTS + features.HOST + "zero.stage=2 mesh.data=4 mesh.tensor=2",
    ],
    ids=[
        "tensor",
        "stage 3",
        "experts and tensor",
        "host",
        "latents of padded heads",
        "latents, host",
    ],
)
def test_texts_do_not_depend_on_the_mesh(settings):
    """Fails if a split of heads, experts or weights changes a text."""
    run = features.start(features.config_of(settings))
    wanted = language.likely_texts(run.bind(run.state), REQUESTS[1:3], LENGTH)
    for (prompt, num_new), text in zip(REQUESTS[1:3], wanted, strict=True):
        found = run.generate(run.state, np.array([prompt]), max_new_tokens=num_new)
        assert found[0].tolist() == [*prompt, *text]
