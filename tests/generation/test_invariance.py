"""Under `batch_invariant`, log-probabilities of sampler and trainer are the same bits.

Those of the sampler are of the pass that drew the token.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.generation.test_equality import FAMILIES as ALL
from tests.support import language
from zjax.config.load import load_config
from zjax.generation.engine import Engine, Request
from zjax.generation.plan import Size
from zjax.generation.pool import Pool
from zjax.generation.programs import CutDecoder
from zjax.generation.sampling import Sampling
from zjax.generation.scheduler import Scheduler
from zjax.generation.sequence import Sequence
from zjax.models import lora
from zjax.models.build import make_model as make_built_in
from zjax.models.stack import hidden_states
from zjax.settings import schema

pytestmark = pytest.mark.usefixtures("unfiltered")

LENGTH, ROWS, PAGE, PAGES, WIDTH = 48, 3, 4, 40, 80
LAYERS = {"tiles": 2, "a layer without rotation": 2}
"""Families of two layers here; one is enough of all others."""
HELD = "gpt", "llama"
"""Parts of families of two layers."""
FAMILIES = {
    name: dataclasses.replace(config, num_layers=LAYERS.get(name, 1))
    for name, config in ALL.items()
    if name not in HELD
}
RNG = np.random.default_rng(3)
SHARED = RNG.integers(0, 29, size=19).tolist()
PROMPTS = SHARED, [*SHARED[:18], 5, 11], RNG.integers(0, 29, size=2).tolist()
WANTED = 25, 28, 32
"""New tokens of each prompt: texts end within blocks of keys, and in the last block of
their pages."""
TEMPERATURE = 0.7
PACKED = (0, 2), (1,)
APART = (1,), (2, 0), ()
"""Texts of each row of a batch of training."""


SIZES = (Size(ROWS, 2),)


def write(decoder, *, chunk_size, sizes=SIZES, page_size=PAGE):
    """Texts that are drawn, and the log-probabilities of the passes that drew them."""
    pool = Pool(PAGES, page_size)
    scheduler = Scheduler([pool], ROWS, LENGTH, sizes, chunk_size=chunk_size)
    shapes = {"num_slots": ROWS, "max_length": LENGTH}
    passes = decoder.passes(num_pages=PAGES, page_size=page_size, **shapes)
    found = {}
    for number, (prompt, num_new) in enumerate(zip(PROMPTS, WANTED, strict=True)):
        how = {"num_logprobs": 0, "filtered_logprobs": True}
        sampling = Sampling(temperature=TEMPERATURE, seed=number, **how)
        each = Sequence(prompt, num_new, request=Request(sampling))
        found[scheduler.add(each)] = []
    for news in Engine(passes, scheduler).run():
        found[news.sequence] += news.logprobs.tolist()
    return [(x.prompt + x.generated, np.float32(y)) for x, y in found.items()]


def trained(model, texts, packed):
    """Log-probabilities of the new tokens of texts that are packed into rows."""
    tokens, ids = np.zeros((2, len(packed), WIDTH), np.int32)
    starts = {}
    for row, numbers in enumerate(packed):
        column = 0
        for place, number in enumerate(numbers):
            end = column + len(texts[number])
            tokens[row, column:end] = texts[number]
            ids[row, column:end] = place + 1
            starts[number], column = (row, column), end
    graph, state = nnx.split(model)

    @jax.jit
    def score(state, tokens, ids):
        model = nnx.merge(graph, state)
        table = model.embedding.tokens[...] if model.config.tied_head else None
        hidden = hidden_states(model, {"tokens": tokens, "segment_ids": ids}, None)
        targets = jnp.roll(tokens, -1, axis=1)
        found = model.head.target_logprobs(hidden, table, targets, TEMPERATURE)
        return found.logprobs

    scores = np.asarray(score(state, tokens, ids))
    found = []
    for number, num_new in enumerate(WANTED):
        row, column = starts[number]
        end = column + len(texts[number]) - 1
        found.append(scores[row, end - num_new : end])
    return found


def make_model(config, dtype=jnp.float32):
    config = dataclasses.replace(config, max_length=WIDTH)
    model = language.make_language_model(config, batch_invariant=True)
    return in_dtype(model, dtype)


def in_dtype(model, dtype):
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda x: x.astype(dtype), state))


def with_adapters():
    config = dataclasses.replace(ALL["llama"], num_layers=1, max_length=WIDTH)
    model = language.make_language_model(config, batch_invariant=True)
    lora.attach(model, jax.random.key(0), settings=schema.Lora(rank=3))
    graph, state = nnx.split(model)

    def fill(path, x):
        is_b = "'b'" in jax.tree_util.keystr(path)
        return x + np.float32(0.3 * RNG.normal(size=x.shape)) if is_b else x

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(fill, state))


def assert_same(written, model, packed=PACKED):
    texts, logprobs = zip(*written, strict=True)
    for own, found in zip(logprobs, trained(model, texts, packed), strict=True):
        np.testing.assert_array_equal(own, found)


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_sampler_and_trainer_agree_to_the_last_bit(config):
    """Fails if a product, a sum or a rounding of a token depends on the batch."""
    model = make_model(config)
    written = write(CutDecoder(model), chunk_size=5)
    assert len({token for text, _ in written for token in text}) > 8
    assert_same(written, model)


def test_adapters_agree():
    model = with_adapters()
    written = write(CutDecoder(model), chunk_size=5)
    assert_same(written, model)


def test_16_bits_chunks_and_steps_change_no_bit():
    """In bfloat16, whose roundings a compiler may drop beside float32."""
    shallow = dataclasses.replace(ALL["gpt"], num_layers=1)
    model = make_model(shallow, jnp.bfloat16)
    decoder = CutDecoder(model)
    written = write(decoder, chunk_size=3)
    assert_same(written, model, APART)
    sizes = Size(ROWS, 1), Size(ROWS, steps=4)
    again = write(decoder, chunk_size=8, sizes=sizes)
    for (text, own), (other, found) in zip(written, again, strict=True):
        assert text == other
        np.testing.assert_array_equal(own, found)


def test_the_setting_reaches_training():
    """Fails if the loss of a row depends on rows beside it that weigh nothing."""
    settings = {
        "precision": {"batch_invariant": True, "compute_dtype": "float32"},
        "model": {
            "num_layers": 1,
            "embed_size": 40,
            "num_heads": 2,
            "vocab_size": 29,
            "max_length": 24,
        },
    }
    model = make_built_in(load_config(settings))
    params, state = model.init(jax.random.key(0))
    assert model.bind(params, state).invariant
    tokens = RNG.integers(0, 29, size=(5, 25)).astype(np.int32)
    weights = np.zeros((5, 24), np.float32)
    weights[2, 17] = 1
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
    alone = {name: x[2:3] for name, x in batch.items()}
    loss = jax.jit(lambda batch: model.loss(params, state, batch, None).value)
    assert loss(batch) == loss(alone)


def test_the_usual_model_does_not_agree():
    """Fails if the tests above would pass without the mode."""
    model = language.make_language_model(
        dataclasses.replace(ALL["gpt"], max_length=WIDTH)
    )
    texts, logprobs = zip(*write(CutDecoder(model), chunk_size=5), strict=True)
    found = trained(model, texts, PACKED)
    gaps = np.abs(np.concatenate(logprobs) - np.concatenate(found))
    assert 0 < gaps.max() < 1e-4
