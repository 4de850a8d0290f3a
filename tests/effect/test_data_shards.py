"""The data axis of a mesh must split the rows and the pages of texts."""

import re

import jax
import numpy as np
import pytest

from tests.support import features
from zjax.generation import drafts, programs
from zjax.generation.engine import Engine, Request
from zjax.generation.plan import Size
from zjax.generation.pool import Pool
from zjax.generation.programs import CutDecoder
from zjax.generation.sampling import Sampling
from zjax.generation.scheduler import Scheduler
from zjax.generation.sequence import Sequence
from zjax.generation.shards import num_shards

ROWS, LENGTH, PAGE = 3, 24, 4
SIZES = Size(ROWS), Size(ROWS, 2), Size(ROWS, steps=4), Size(ROWS, width=4)
COLLECTIVE = r" (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
COLLECTIVE += r"(?:-start)?\(.*?replica_groups=(\{\{[\d,{}]*\}\}|\[[\d,]*\]<=\S*)"
RNG = np.random.default_rng(5)
SHARED = RNG.integers(0, 41, 9).tolist()
REQUESTS = [
    (SHARED, Sampling(max_new_tokens=9)),
    ([*SHARED, 4, 5], Sampling(max_new_tokens=8, temperature=1.0, seed=1)),
    ([7, 8] * 4, Sampling(max_new_tokens=14)),
    ([5] * 8, Sampling(max_new_tokens=2, prompt_logprobs=0)),
    (RNG.integers(0, 41, 9).tolist(), Sampling(max_new_tokens=3, prompt_logprobs=1)),
    ([3], Sampling(max_new_tokens=16, temperature=0.7, top_k=5, seed=2)),
    (RNG.integers(0, 41, 6).tolist(), Sampling(max_new_tokens=12)),
    ([*SHARED[:5], 1], Sampling(max_new_tokens=10, repetition_penalty=1.3)),
    (RNG.integers(0, 41, 11).tolist(), Sampling(max_new_tokens=7, top_p=0.8)),
    *(
        ([9, 9, 2, 1, 1, 3], Sampling(max_new_tokens=11, temperature=1.5, seed=seed))
        for seed in range(6)
    ),
]


class Written:
    """An engine of a run with small passes and pages, and what it writes."""

    def __init__(self, run, *, num_pages):
        self._context = lambda: jax.set_mesh(run.mesh)
        with self._context():
            decoder = CutDecoder(run.decoder(run.state))
            shapes = {"num_slots": ROWS, "max_length": LENGTH}
            self.passes = decoder.passes(num_pages=num_pages, page_size=PAGE, **shapes)
            pools = [Pool(num_pages, PAGE) for _ in range(num_shards(decoder.axes))]
            self.scheduler = Scheduler(pools, ROWS, LENGTH, SIZES, chunk_size=4)
            self.engine = Engine(self.passes, self.scheduler, axes=decoder.axes)

    def write(self):
        """Returns all texts and scores but of the last request, which is aborted."""
        texts = [
            Sequence(
                prompt,
                sampling.max_new_tokens,
                prompt_logprobs=sampling.prompt_logprobs,
                request=Request(sampling),
            )
            for prompt, sampling in REQUESTS
        ]
        scores = {text: [] for text in texts}
        for text in texts:
            self.scheduler.add(text)
        with self._context():
            first = self.engine.step()
            self.scheduler.abort(texts[-1])
            for news in (*first, *self.engine.run()):
                found = news.prompt.logprobs if news.prompt else ()
                scores[news.sequence] += np.round(found, 3).tolist()
        assert self.scheduler.metrics.num_live_pages == 0
        return [(text.generated, scores[text]) for text in texts[:-1]]


def start(settings, number):
    """A run of one layer, which has rows, pages and draws of all shards."""
    config = features.config_of(f"{settings} model.num_layers=1")
    return features.start(config, number)


@pytest.fixture
def compiled(monkeypatch):
    """The text of each program of a pass, by what is static and the shapes."""
    texts = {}

    def watch(name):
        make = getattr(programs, name)

        def watched(placed):
            program = make(placed)

            def run(*args):
                key = name, str(jax.tree.map(np.shape, args[1:]))
                if key not in texts:
                    texts[key] = program.lower(*args).compile().as_text()
                return program(*args)

            run.lower = program.lower
            return run

        monkeypatch.setattr(programs, name, watched)

    watch("_run_pass")
    watch("_run_steps")
    return texts


@pytest.fixture
def made(monkeypatch):
    """Programs of passes, with the number of compilations before they were made."""
    found = {}

    def watch(name):
        make = getattr(programs, name)

        def watched(placed):
            program = make(placed)
            found.setdefault(id(program), (program, program._cache_size()))
            return program

        monkeypatch.setattr(programs, name, watched)

    watch("_run_pass")
    watch("_run_steps")
    return found


def test_a_shard_holds_and_computes_its_rows_alone(compiled):
    """Fails if devices hold pages or compute rows of other shards, or communicate."""
    written = Written(start("mesh.data=4", 4), num_pages=9)
    history = written.passes._history.tokens
    for array, size in ((history, ROWS + 1), *((x, 9) for x in pages_of(written))):
        assert array.shape[0] == 4 * size
        shares = {x.data.nbytes for x in array.addressable_shards}
        assert shares == {array.nbytes // 4}
    written.write()
    # Prompts are scored by a program of their own.
    assert len(compiled) == 4
    for text in compiled.values():
        assert not re.findall(COLLECTIVE, text)
        assert "f32[9,4,4,4]" in text and "f32[36,4,4,4]" not in text
        assert f"f32[{ROWS},1,16]" in text or f"f32[{ROWS + 8},1,16]" in text
        assert "f32[12,1,16]" not in text and "f32[44,1,16]" not in text


def pages_of(written):
    return jax.tree.leaves(written.passes._caches)


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        ("mesh.data=4", 4),
        ("mesh.replica=2 mesh.data=2", 4),
        ("mesh.data=2 mesh.tensor=2", 4),
        (features.EXPERTS + "mesh.data=2 mesh.expert=2", 4),
    ],
    ids=["data", "replicas", "tensor", "experts"],
)
def test_texts_are_those_of_one_device(settings, number, monkeypatch, made):
    """Fails if shards mix up rows, pages or draws, also with drafts and preemption."""
    monkeypatch.setattr(drafts, "MIN_GAIN", 0.0)
    alone = " ".join(x for x in settings.split() if "mesh" not in x)
    wanted = Written(start(alone + " mesh.data=1", 1), num_pages=40).write()
    made.clear()
    written = Written(start(settings, number), num_pages=8)
    found = written.write()
    assert [text for text, _ in found] == [text for text, _ in wanted]
    lengths = [len(x) for _, x in found]
    assert sorted(lengths)[-2:] == [7, 8] and sum(lengths) == 15
    for pair in zip(found, wanted, strict=True):
        np.testing.assert_allclose(*(x for _, x in pair), atol=2e-3)
    # Prompts are scored by a program of their own.
    numbers = [program._cache_size() - before for program, before in made.values()]
    assert 0 < sum(numbers) <= 1 + len(SIZES)
    metrics = written.scheduler.metrics
    assert metrics.num_preemptions > 0
    assert metrics.num_accepted_drafts > 0
    hits = [slots.num_hit_tokens for slots in written.scheduler.shards]
    assert sum(hits) == metrics.num_hit_tokens > max(hits)
