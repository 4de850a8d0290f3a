"""Texts of models of users, which read the whole text again for each token."""

import collections
import dataclasses
import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zjax
from tests.support import language, small_run
from tests.support.refusals import config_error
from zjax.data.prompts import Prompts
from zjax.data.tokenizer import make_bytes
from zjax.generation import recomputed
from zjax.generation.engine import Request
from zjax.generation.generate import make_engine
from zjax.generation.loading import open_decoder
from zjax.generation.plan import Size
from zjax.generation.sequence import Sequence

SIZE, VOCAB_SIZE = 16, 257
RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(0, VOCAB_SIZE, size=n).tolist() for n in (3, 1, 70, 9, 62)]
GREEDY = zjax.Sampling(max_new_tokens=5)
MASK = "data.masking.mask_id=60"
TOLD = (
    "text: the model keeps no keys, so that every token reads its whole text again and "
    "the time of a text grows with the square of its length; write short texts, or use "
    "the built-in decoder"
)


def attend(x, *, is_causal=True):
    """Attention of one head without weights, which later tokens do not change."""
    scores = jnp.einsum("blm,bkm->blk", x, x)
    mask = jnp.tril(jnp.ones(scores.shape[1:], bool)) | (not is_causal)
    return x + jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)) @ jnp.roll(x, 1, -1)


class OfNnx(nnx.Module):
    def __init__(self, rngs, is_causal=True):
        self.embed = nnx.Embed(VOCAB_SIZE, SIZE, rngs=rngs)
        self.out = nnx.Linear(SIZE, VOCAB_SIZE, rngs=rngs)
        self.is_causal = is_causal

    def __call__(self, tokens):
        return self.out(attend(self.embed(tokens), is_causal=self.is_causal))


class OfLinen(nn.Module):
    @nn.compact
    def __call__(self, tokens, flips=False):
        x = attend(nn.Embed(VOCAB_SIZE, SIZE)(tokens))
        logits = nn.Dense(VOCAB_SIZE)(nn.Dropout(0.5, deterministic=False)(x))
        return -logits if flips else logits


MODELS = {"linen": OfLinen(), "nnx": OfNnx}


def start(model):
    def loss_fn(model, batch, key):
        logits, targets = model(batch[:, :-1]), batch[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    config = {
        "precision": {"compute_dtype": "float32"},
        "zero": {"stage": 3, "min_shard_elements": 64},
    }
    batch = RNG.integers(0, VOCAB_SIZE, size=(8, 9)).astype(np.int32)
    run = zjax.initialize(model, optax.adam(0.1), loss_fn, batch, config)
    return run, run.step(run.state, batch)[0]


@pytest.fixture(scope="module", params=MODELS)
def started(request):
    return start(MODELS[request.param])


@pytest.fixture(scope="module")
def linen():
    """What is of the logits is the same of both kinds of modules."""
    return start(MODELS["linen"])


def make(started, **settings):
    return zjax.Generator(*started, **({"max_length": 96, "max_rows": 4} | settings))


def most_likely(module, prompt, text, sign=1):
    """The most likely token behind each prefix that a text continues.

    The model is causal, so that one pass without padding has all of them.
    """
    [scores] = sign * np.asarray(module(jnp.array([[*prompt, *text]])))
    return scores[len(prompt) - 1 : -1].argmax(axis=-1).tolist()


@pytest.mark.usefixtures("greedy")
def test_texts_are_the_most_likely_and_the_cost_is_told(started, monkeypatch, caplog):
    """Fails if padding, a neighbour or a group of rows changes a text."""
    run, state = started
    module = run.bind(state)
    with caplog.at_level(logging.WARNING), make(started) as generator:
        wanted = [text.ids for text in generator.generate(PROMPTS, GREEDY)]
        assert {len(text) for text in wanted} == {5}
        for prompt, text in zip(PROMPTS, wanted, strict=True):
            assert text == most_likely(module, prompt, text)
        assert len({token for text in wanted for token in text}) > 5
        each = generator.generate_each(PROMPTS, GREEDY)
        assert [texts[0].ids for texts in each] == wanted
        deltas = [*generator.stream(PROMPTS[0], GREEDY)]
    assert [x for delta in deltas for x in delta.ids] == wanted[0]
    assert caplog.messages.count(TOLD) == 1
    monkeypatch.setattr(recomputed, "_LOGITS_BYTES", 2 * 4 * VOCAB_SIZE * 96)
    with make(started) as generator:
        assert [x.ids for x in generator.generate(PROMPTS, GREEDY)] == wanted


@pytest.mark.usefixtures("greedy")
def test_prompts_are_scored(linen):
    """Fails if a chunk is scored without the text before, or behind padding."""
    module = linen[0].bind(linen[1])
    prompts = [*PROMPTS, RNG.integers(0, VOCAB_SIZE, size=96).tolist()]
    with make(linen) as generator:
        wanted = [text.ids for text in generator.generate(PROMPTS[:3], GREEDY)]
        sampling = dataclasses.replace(GREEDY, prompt_logprobs=2)
        texts = generator.generate(PROMPTS[:3], sampling)
        assert [text.ids for text in texts] == wanted
        texts += generator.generate(prompts[3:], zjax.Sampling(prompt_logprobs=2))
    for prompt, text in zip(prompts, texts, strict=True):
        scores = np.asarray(jax.nn.log_softmax(module(jnp.array([prompt]))[0]))
        found = np.array(text.prompt_logprobs[1:])
        chosen = scores[np.arange(len(prompt) - 1), prompt[1:]]
        np.testing.assert_allclose(found, chosen, atol=1e-4)
        best = [max(x.values()) for x in text.prompt_best[1:]]
        np.testing.assert_allclose(best, scores[:-1].max(axis=1), atol=1e-4)


@pytest.mark.usefixtures("greedy")
def test_a_function_gives_the_logits(started):
    """Fails if the function is not called, or with other weights."""
    run, state = started

    def flipped(model, tokens):
        return -model(tokens)

    with make(started, logits_fn=flipped) as generator:
        [text] = generator.generate([PROMPTS[0]], GREEDY)
    assert len(text.ids) == 5
    assert text.ids == most_likely(run.bind(state), PROMPTS[0], text.ids, sign=-1)


def test_all_of_sampling_is_honoured(linen):
    run, state = linen
    module, prompts = run.bind(state), Prompts(make_bytes())
    sampling = zjax.Sampling(
        max_new_tokens=6,
        temperature=1.0,
        num_samples=3,
        num_logprobs=2,
        seed=5,
        end_ids=(),
    )
    with make(linen, prompts=prompts) as generator:
        texts = generator.generate(["ab", "c"], sampling)
        again = generator.generate(["c"], sampling)
        whole = generator.generate(["ab"], GREEDY)[0].text
        stop = zjax.Sampling(max_new_tokens=5, stop=(whole[-1],))
        cut = generator.generate(["ab"], stop)[0]
    assert [x.ids for x in again] == [x.ids for x in texts[3:]]
    assert len({tuple(x.ids) for x in texts}) == 6
    assert (cut.finish_reason, cut.text) == ("stop", whole[: whole.index(whole[-1])])
    for text, given in zip(texts, [b"ab"] * 3 + [b"c"] * 3, strict=True):
        tokens = jnp.array([[*given, *text.ids]])
        logits = jax.nn.log_softmax(module(tokens)[0, len(given) - 1 : -1])
        wanted = np.asarray(logits)[np.arange(6), text.ids]
        np.testing.assert_allclose(text.logprobs, wanted, atol=1e-4)


@pytest.mark.usefixtures("greedy")
def test_few_programs_read_few_rows(linen):
    """Fails if idle rows are computed, or each length of a text is a program."""
    shapes = []

    def spied(model, tokens):
        shapes.append(tokens.shape)
        return model(tokens)

    with make(linen, logits_fn=spied, max_rows=8) as generator:
        shapes.clear()  # of the checks
        for prompt in PROMPTS[:2]:
            generator.generate([prompt], GREEDY)
        assert {*shapes} == {(1, 64)}
        generator.generate(PROMPTS, GREEDY)
    assert {*shapes} <= {(1, 64), (8, 64), (1, 96), (8, 96)}
    # A pass of prompts, and a pass of tokens, of each shape at most.
    assert len(shapes) <= 8


@pytest.mark.usefixtures("greedy")
def test_drafts_are_read_in_one_pass(linen):
    """Fails if a draft is not read, or a wrong one changes the text."""
    run, state = linen
    context, prompts = jax.set_mesh(run.mesh), ([5, 6, 7] * 8, [9, 9, 9])
    with context:
        model = open_decoder(run, state, None, None, 96).decoder
        sizes = Size(4), Size(4, 0, 4), Size(4, 8)
        scheduler = (engine := make_engine(model, sizes, 96, 20)).scheduler
        texts = [scheduler.add(Sequence(x, 40, request=Request())) for x in prompts]
        collections.deque(engine.run(), maxlen=0)
    module = run.bind(state)
    for text in texts:
        assert len(text.generated) == 40
        assert text.generated == most_likely(module, text.prompt, text.generated)
    assert 0 < scheduler.metrics.num_accepted_drafts


@pytest.mark.parametrize(
    ("logits_fn", "problem"),
    [
        (
            lambda model, tokens: model(tokens)[:, -1],
            "gives float32[1, 257] for tokens int32[1, 64]; give logits_fn(model, "
            "tokens) -> logits [B, L, V], of any L up to max_length=96",
        ),
        (
            lambda model, tokens: model(tokens, 3, 4, 5),
            "fails for tokens int32[1, 64] (TypeError: ",
        ),
        (
            lambda model, tokens: model(tokens[:, ::-1])[:, ::-1],
            "gives logits that depend on later tokens; give a causal model, whose "
            "logits at a place read the tokens up to it",
        ),
    ],
    ids=["no-logits", "fails", "reversed"],
)
def test_functions_that_give_no_logits_of_a_causal_model_are_refused(
    started, logits_fn, problem
):
    with pytest.raises(zjax.ConfigError) as error:
        make(started, logits_fn=logits_fn)
    assert str(error.value).startswith(f"logits_fn='<lambda>' {problem}")


def test_lengths_and_functions_that_are_not_known_or_not_read_are_refused(
    linen, tmp_path
):
    with config_error(
        "max_length=0 is no length of texts that your model reads; give the most "
        "tokens of a prompt with a text, 2 or more"
    ):
        make(linen, max_length=0)
    with config_error(
        "logits_fn='given' is not read: the built-in decoder has logits of its own; "
        "leave it out"
    ):
        model = language.make_language_model(language.LLAMA)
        zjax.Generator(model, logits_fn=lambda model, tokens: model(tokens))
    with config_error(
        "model='given' keeps no keys to continue text from; use zjax.Generator(run, "
        "state, max_length=...), which reads the whole text for each token, or the "
        "built-in decoder"
    ):
        linen[0].generate(linen[1], [[1]], max_new_tokens=1)
    encoder = small_run.make_trainer(tmp_path, "model.kind=encoder", MASK)
    with pytest.raises(zjax.ConfigError, match="logits_fn=None fails for tokens"):
        zjax.Generator(encoder.run, encoder.state, max_length=16)
