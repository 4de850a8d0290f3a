import dataclasses
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support import language, sparse
from zjax.errors import ConfigError, DataError
from zjax.generation import generate
from zjax.generation.chunks import Chunks
from zjax.generation.passes import Reader, last_of_chunks
from zjax.generation.programs import CutDecoder
from zjax.generation.prompts import read_prompts
from zjax.generation.sampling import Sampling
from zjax.models import lora
from zjax.models.continuation import params_of
from zjax.settings import schema

NUM_NEW = 5
WINDOW = dataclasses.replace(language.LLAMA, window=schema.SlidingWindow(size=3))
DYNAMIC = dataclasses.replace(
    language.LLAMA,
    positions=schema.Rotary(
        max_positions=16, scaling=schema.DynamicRope(factor=4.0, original_length=4)
    ),
)
FORMS = {
    "gpt": language.GPT,
    "qwen3": language.QWEN3,
    "latents": language.LATENT,
    "window": WINDOW,
    "tiles": dataclasses.replace(language.GPT, mlp_tiles=2),
    "geglu": dataclasses.replace(
        language.LLAMA,
        activation="geglu",
        norm_position="both",
        zero_centered_norm=True,
    ),
}
MODELS = pytest.mark.parametrize("config", FORMS.values(), ids=FORMS)
RARE_FORMS = {
    "soft caps and sinks": dataclasses.replace(
        language.LLAMA, attention_soft_cap=2.0, logit_soft_cap=3.0, attention_sinks=True
    ),
    "experts": dataclasses.replace(
        language.LLAMA, moe=schema.TokenChoice(num_experts=4, top_k=2, num_shared=1)
    ),
    "a layer without rotation": dataclasses.replace(
        language.LLAMA, positions=schema.Rotary(unrotated_every=2)
    ),
}
ALL_FORMS = FORMS | RARE_FORMS


class Text:
    """Reads texts of a model piece by piece, each in pages of its own."""

    def __init__(self, model, num_rows, page_size=4, num_pages=4):
        self.reader = Reader.of(model)
        self.weights = self.reader.cut(params_of(model))
        total = 1 + num_rows * num_pages
        self.caches = self.reader.empty_caches(self.weights, total, page_size)
        pages = np.arange(1, total, dtype=np.int32)
        # Not in order: a table alone says which page is which.
        pages = np.random.default_rng(0).permutation(pages)
        self.pages = jnp.asarray(pages.reshape(num_rows, num_pages))
        self._read = jax.jit(self._read_chunks)

    def read(self, tokens, starts, counts, given=0):
        """Scores after the last token of a chunk of each row."""
        rows = [jnp.full(len(self.pages), x, jnp.int32) for x in (given, 16)]
        numbers = [jnp.asarray(x, jnp.int32) for x in (starts, counts)]
        chunks = Chunks(jnp.asarray(tokens, jnp.int32), *numbers, self.pages, *rows)
        scores, self.caches = self._read(self.weights, self.caches, chunks)
        return scores

    def _read_chunks(self, weights, caches, chunks):
        stream, caches, _ = self.reader.read(weights, caches, (chunks,))
        last = last_of_chunks((chunks,), stream)
        return self.reader.continuation.score(weights.head, last), caches


@pytest.mark.parametrize(
    ("form", "size"),
    [*((form, 1) for form in ALL_FORMS), *((form, 3) for form in ("gpt", "latents"))],
)
def test_scores_of_chunks_equal_those_of_the_whole_sequence(form, size):
    """Fails if a key is lost at the end of a page, or of a chunk.

    Texts of all families are read in chunks of 3 tokens by the tests of equality.
    """
    config = ALL_FORMS[form]
    model = language.make_language_model(config)
    tokens = np.asarray(language.make_text(config)["tokens"])
    whole = language.logits_of(model, {"tokens": tokens})
    text, num_rows = Text(model, len(tokens)), len(tokens)
    for first in range(0, language.LENGTH, size):
        chunk = tokens[:, first : first + size]
        count = chunk.shape[1]
        padded = np.pad(chunk, [(0, 0), (0, size - count)], constant_values=7)
        found = text.read(padded, [first] * num_rows, [count] * num_rows)
        wanted = whole[:, first + count - 1]
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "pattern",
    [schema.Local(num_sliding_window_blocks=1), schema.Bigbird()],
    ids=["local", "bigbird"],
)
def test_sparse_layers_see_their_blocks_alone(pattern):
    """Fails if a token sees a page that the layout hides, or none of its own block."""
    attention = dataclasses.replace(sparse.SPARSE, pattern=pattern)
    config = dataclasses.replace(sparse.GPT, attention=attention)
    model = language.make_language_model(config)
    tokens = np.asarray(language.make_text(config, length=72)["tokens"])
    whole = language.logits_of(model, {"tokens": tokens})
    text, num_rows = Text(model, len(tokens), page_size=8, num_pages=12), len(tokens)
    for first in range(0, 72, 24):
        chunk = tokens[:, first : first + 24]
        found = text.read(chunk, [first] * num_rows, [24] * num_rows)
        np.testing.assert_allclose(found, whole[:, first + 23], rtol=1e-4, atol=1e-4)


def test_dynamic_positions_do_not_depend_on_chunks():
    """Fails if a part of a prompt rotates as if the prompt ended there."""
    model = language.make_language_model(DYNAMIC)
    tokens = np.asarray(language.make_text(DYNAMIC)["tokens"])
    whole = language.logits_of(model, {"tokens": tokens})[:, -1]
    text, num_rows = Text(model, len(tokens)), len(tokens)
    for first in (0, 4):
        chunk = tokens[:, first : first + 4]
        found = text.read(chunk, [first] * num_rows, [4] * num_rows, given=8)
    np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-4)


def test_a_cache_holds_latents_alone():
    """6 channels of a latent and 2 that rotate, not those of 4 heads."""
    text = Text(language.make_language_model(language.LATENT), 2)
    shapes = {x.shape[1:] for x in jax.tree.leaves(text.caches)}
    assert shapes == {(1, 4, 8)} and len(jax.tree.leaves(text.caches)) == 2


def test_devices_share_out_the_matrices_of_latents():
    """Fails if a device holds matrices of other heads, or a part of a matrix."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    with jax.set_mesh(jax.make_mesh((2, 2), ("sequence", "tensor"), axis_types=auto)):
        decoder = CutDecoder(language.make_language_model(language.LATENT))
    for block in decoder._weights.blocks:
        for name, shape in {"to_keys": (2, 3, 6), "to_values": (2, 6, 4)}.items():
            matrices: Any = block["attention"][name]
            assert {x.data.shape for x in matrices.addressable_shards} == {shape}


def test_matrices_of_latents_include_adapters():
    """Fails if the matrices that queries and outputs absorb are frozen kernels."""
    model = language.make_language_model(language.LATENT)
    tokens = np.asarray(language.make_text(language.LATENT)["tokens"])
    plain = language.logits_of(model, {"tokens": tokens})
    settings = schema.Lora(rank=2, form="dora", targets=("key_value",))
    lora.attach(model, jax.random.key(0), settings=settings)
    for _, module in [*nnx.iter_modules(model)]:
        if isinstance(module, lora.Adapter):
            module.b[...] += 0.3
    whole, num_rows = language.logits_of(model, {"tokens": tokens}), len(tokens)
    assert np.abs(whole - plain).max() > 0.1
    counts = [tokens.shape[1]] * num_rows
    found = Text(model, num_rows).read(tokens, [0] * num_rows, counts)
    np.testing.assert_allclose(found, whole[:, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("greedy")
@MODELS
def test_greedy_continuation_is_the_most_likely_one(config):
    """Fails if a token is chosen by other logits, or a number of a column is an int64
    beside int32 where numbers are wide by default."""
    model = language.make_language_model(config)
    prompt = language.make_text(config, length=3)["tokens"]
    found = generate.generate(model, prompt, max_new_tokens=NUM_NEW)
    np.testing.assert_array_equal(found[:, :3], prompt)
    most_likely = np.argmax(language.logits_of(model, {"tokens": found}), -1)
    np.testing.assert_array_equal(found[:, 3:], most_likely[:, 2:-1])
    assert len(set(np.asarray(found).ravel().tolist())) > 4
    with jax.enable_x64(True):
        wide = generate.generate(model, prompt, max_new_tokens=NUM_NEW)
    np.testing.assert_array_equal(found, wide)


@pytest.mark.usefixtures("greedy")
def test_prompts_of_different_lengths_continue_as_alone():
    """Fails if padding is seen, or counted as positions."""
    model = language.make_language_model(language.GPT)
    tokens = language.make_text(language.GPT, length=4)["tokens"]
    lengths = jnp.array([4, 2], jnp.int32)
    found = generate.generate(model, tokens, lengths=lengths, max_new_tokens=NUM_NEW)
    for row, length in enumerate(lengths):
        alone = generate.generate(
            model, tokens[row : row + 1, 4 - length :], max_new_tokens=NUM_NEW
        )
        np.testing.assert_array_equal(found[row, 4:], alone[0, length:])


@pytest.mark.usefixtures("greedy")
def test_rows_end_at_the_first_of_the_end_ids():
    """Fails if one end id alone ends rows, or what follows an end is not filled."""
    model = language.make_language_model(language.GPT)
    prompt = language.make_text(language.GPT, length=3)["tokens"]
    free = np.asarray(generate.generate(model, prompt, max_new_tokens=NUM_NEW))
    end_ids = [int(free[0, 5]), int(free[1, 4])]
    assert end_ids[0] != end_ids[1]
    found = generate.generate(model, prompt, max_new_tokens=NUM_NEW, end_ids=end_ids)
    expected = free.copy()
    for row in expected:
        stop = 3 + np.flatnonzero(np.isin(row[3:], end_ids))[0]
        row[stop + 1 :] = end_ids[0]
    np.testing.assert_array_equal(found, expected)
    assert set(found[:, -1].tolist()) == {end_ids[0]}
    assert len({*found[:, 3:].ravel().tolist()}) > 2


def test_draws_depend_on_key_and_row_alone():
    """Fails if a draw depends on devices, on rows beside it, or on wide numbers."""
    model = language.make_language_model(language.GPT)
    prompt = language.make_text(language.GPT, rows=8, length=3)["tokens"]

    def draw(prompt, seed, num_new=NUM_NEW):
        return generate.generate(
            model,
            prompt,
            max_new_tokens=num_new,
            key=jax.random.key(seed),
            temperature=1.5,
            top_k=20,
            top_p=0.95,
        )

    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    split = jax.device_put(prompt, jax.sharding.NamedSharding(mesh, spec))
    first = draw(prompt, 0)
    np.testing.assert_array_equal(first, draw(split, 0))
    np.testing.assert_array_equal(first[:4, :4], draw(prompt[:4], 0, num_new=1))
    assert not np.array_equal(first, draw(prompt, 1))
    with jax.enable_x64(True):
        np.testing.assert_array_equal(first, draw(prompt, 0))


@pytest.mark.usefixtures("greedy")
def test_nothing_compiles_per_token_or_per_call(caplog):
    model = language.make_language_model(language.GPT)
    prompt = language.make_text(language.GPT, length=4)["tokens"]
    generate.generate(model, prompt, max_new_tokens=2)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        generate.generate(
            language.make_language_model(language.GPT), prompt, max_new_tokens=2
        )
    texts = [record.getMessage() for record in caplog.records]
    assert not [text for text in texts if text.startswith("Compiling")]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"max_new_tokens": 0},
            "max_new_tokens=0 is below 1; ask for 1 or more",
        ),
        (
            {"max_new_tokens": 14},
            "max_new_tokens=14 leaves model.max_length=16 after 3; "
            "ask for 13 or fewer, or shorten the prompt",
        ),
        (
            {"temperature": math.nan},
            "temperature=nan is neither 0 nor 1e-05 or more; "
            "use 0 for the most likely token, or 1 for the model's distribution",
        ),
        (
            {"temperature": -1.0},
            "temperature=-1.0 is neither 0 nor 1e-05 or more; "
            "use 0 for the most likely token, or 1 for the model's distribution",
        ),
        (
            {"temperature": 1.0},
            "key=None is missing and temperature=1.0 draws tokens; "
            "pass jax.random.key(0)",
        ),
        (
            {"lengths": jnp.array([4])},
            "lengths=4 is not between 1 and the 3 columns of tokens; "
            "count the tokens of each prompt, without its padding",
        ),
        (
            {"end_ids": (3, 29)},
            "end_ids=(3, 29) has 29, which is no id of 29; use 0 to 28, or () for none",
        ),
        (
            {"top_k": 30, "top_p": 0.0},
            "top_k=30 is not between 0 and model.vocab_size=29; use 0 for all\n"
            "top_p=0.0 is not above 0 and up to 1; use 1 for all",
        ),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(given, message):
    model = language.make_language_model(language.GPT)
    prompt = jnp.zeros((1, 3), jnp.int32)
    with pytest.raises(ConfigError) as error:
        generate.generate(model, prompt, **({"max_new_tokens": 1} | given))
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        (
            np.zeros(3, np.int32),
            None,
            "tokens='[3]' are no prompts; give int[B, L], each row one token or more",
        ),
        (
            np.zeros((2, 3), np.int32),
            np.array([3]),
            "lengths='[1]' are not the lengths of 2 prompts; give one to each",
        ),
        (
            np.array([[0, 29]]),
            None,
            "prompt/tokens=29 is no id of 29; use 0 to 28",
        ),
        (
            jnp.array([[0, 1], [-1, 2]]),
            jnp.array([1, 2]),
            "prompt/tokens=-1 is no id of 29; use 0 to 28",
        ),
        (
            np.array([[0, 2**32]]),
            None,
            "prompt/tokens=4294967296 does not fit 32 bits; renumber it or remove it",
        ),
        (
            np.array([[0.5, 1.0]]),
            None,
            "prompt/tokens='float32[1, 2]' is not integer[B, L]; give that shape and "
            "dtype",
        ),
    ],
    ids=["no-rows", "lengths", "beyond", "negative", "wide", "fractions"],
)
def test_prompts_that_are_no_ids_are_refused(tokens, lengths, message):
    """Fails if the embedding answers zeros to an id that it does not have."""
    settings = Sampling(max_new_tokens=1)
    with pytest.raises((ConfigError, DataError)) as error:
        read_prompts(language.GPT, tokens, lengths, settings, None)
    assert str(error.value) == message


def test_padding_may_be_any_integer():
    tokens, lengths = jnp.array([[-1, 99, 3]]), jnp.array([1])
    settings = Sampling(max_new_tokens=1)
    (found,) = read_prompts(language.GPT, tokens, lengths, settings, None)
    assert found.tolist() == [3]


def test_traced_prompts_are_refused():
    model = language.make_language_model(language.GPT)
    with pytest.raises(ConfigError) as error:
        jax.eval_shape(
            lambda x: generate.generate(model, x, max_new_tokens=1),
            jnp.zeros((1, 2), jnp.int32),
        )
    assert str(error.value) == (
        "tokens='traced' cannot be read in a program; generate outside of jax.jit"
    )


def test_rotary_models_write_no_more_than_their_length():
    settings = Sampling(max_new_tokens=14)
    tokens = np.zeros((1, 3), np.int32)
    with pytest.raises(ConfigError) as error:
        read_prompts(language.LLAMA, tokens, None, settings, None)
    assert str(error.value) == (
        "max_new_tokens=14 leaves model.max_length=16 after 3; "
        "ask for 13 or fewer, or shorten the prompt"
    )


def test_lengths_that_are_no_integers_are_refused():
    settings = Sampling(max_new_tokens=1)
    tokens, lengths = np.zeros((1, 3), np.int32), np.array([2.0])
    with pytest.raises(ConfigError) as error:
        read_prompts(language.GPT, tokens, lengths, settings, None)
    assert str(error.value) == "lengths='float64' are no integers; give int[B]"


@pytest.mark.parametrize(
    ("scaling", "longest", "name"),
    [
        (None, 64, "positions.max_positions"),
        (
            schema.DynamicRope(factor=4.0, original_length=64),
            256,
            "positions.max_positions * model.positions.scaling.factor",
        ),
    ],
    ids=["plain", "dynamic"],
)
def test_rotary_models_write_up_to_the_positions_that_they_are_for(
    scaling, longest, name
):
    """Fails if the rows of a fine-tuning bound the text."""
    positions = schema.Rotary(max_positions=64, scaling=scaling)
    config = dataclasses.replace(language.LLAMA, positions=positions)
    tokens, free = np.zeros((1, 3), np.int32), longest - 3
    settings = Sampling(max_new_tokens=free)
    read_prompts(config, tokens, None, settings, None)
    settings = Sampling(max_new_tokens=free + 1)
    with pytest.raises(ConfigError) as error:
        read_prompts(config, tokens, None, settings, None)
    assert str(error.value) == (
        f"max_new_tokens={free + 1} leaves model.{name}={longest} after 3; "
        f"ask for {free} or fewer, or shorten the prompt"
    )
