import dataclasses
import functools
import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import language
from zjax.errors import ConfigError, DataError
from zjax.models import generate
from zjax.models.cached import sample_tokens
from zjax.settings import schema
from zjax.typing import Columns

NUM_NEW = 5
FORMS = {
    "gpt": language.GPT,
    "qwen3": language.QWEN3,
    "latents": language.LATENT,
    "llama-in-a-loop": dataclasses.replace(language.LLAMA, layers_per_scan=1),
}
MODELS = pytest.mark.parametrize("config", FORMS.values(), ids=FORMS)


def read_at(model, tokens, column, caches):
    """Scores and caches of a pass from `column` on."""
    columns = Columns(None, column, 3 + NUM_NEW)
    return generate.make_reader(model)(tokens, columns, caches)


@MODELS
def test_cached_scores_equal_those_of_the_whole_sequence(config):
    model = language.make_language_model(config)
    batch = language.make_text(config)
    tokens, scores, caches = batch["tokens"], [], None

    @jax.jit
    def read(tokens, column, caches):
        return read_at(model, tokens, column, caches)

    for end in range(3, language.LENGTH + 1):
        first = end - 1 if caches else 0
        found, caches = read(tokens[:, first:end], jnp.int32(first), caches)
        scores.append(found)
    whole = language.logits_of(model, batch)[:, 2:]
    np.testing.assert_allclose(np.stack(scores, 1), whole, rtol=1e-4, atol=1e-4)


def test_a_cache_holds_latents_alone():
    """6 channels of a latent and 2 that rotate, not those of 4 heads."""
    model = language.make_language_model(language.LATENT)

    def start():
        return read_at(model, jnp.zeros((language.ROWS, 3), jnp.int32), 0, None)

    _, caches = jax.eval_shape(start)
    shapes = {x.shape[-3:] for x in jax.tree.leaves(caches)}
    assert shapes == {(3 + NUM_NEW, 1, 8)} and len(jax.tree.leaves(caches)) == 2


@MODELS
def test_greedy_continuation_is_the_most_likely_one(config):
    model = language.make_language_model(config)
    prompt = language.make_text(config, length=3)["tokens"]
    found = generate.generate(model, prompt, max_new_tokens=NUM_NEW)
    np.testing.assert_array_equal(found[:, :3], prompt)
    most_likely = np.argmax(language.logits_of(model, {"tokens": found}), -1)
    np.testing.assert_array_equal(found[:, 3:], most_likely[:, 2:-1])
    assert len(set(np.asarray(found).ravel().tolist())) > 4


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


WINDOW = dataclasses.replace(language.LLAMA, window=schema.SlidingWindow(size=3))


@pytest.mark.parametrize("config", [language.GPT, WINDOW], ids=["gpt", "window"])
def test_scores_behind_padding_are_those_without(config):
    """Fails if padding is seen, which may leave the most likely token as it is."""
    model = language.make_language_model(config)
    read = generate.make_reader(model)
    tokens = language.make_text(config, length=6)["tokens"]

    @functools.partial(jax.jit, static_argnums=2)
    def scores(tokens, starts, length):
        columns = Columns(starts, 0, tokens.shape[1])
        found, caches = read(tokens[:, :length], columns, None)
        columns = dataclasses.replace(columns, first=length)
        return found, read(tokens[:, length : length + 1], columns, caches)[0]

    starts = [1, 3]
    padded = scores(tokens, jnp.array(starts), 4)
    for row, start in enumerate(starts):
        alone = scores(tokens[row : row + 1, start:], None, 4 - start)
        for found, wanted in zip(padded, alone, strict=True):
            np.testing.assert_allclose(found[row], wanted[0], rtol=1e-4, atol=1e-4)


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
    model = language.make_language_model(language.GPT)
    prompt = language.make_text(language.GPT, rows=8, length=3)["tokens"]

    def draw(prompt, seed):
        return generate.generate(
            model,
            prompt,
            max_new_tokens=NUM_NEW,
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
    np.testing.assert_array_equal(first[:4], draw(prompt[:4], 0))
    assert not np.array_equal(first, draw(prompt, 1))


def test_nothing_compiles_per_token_or_per_call(caplog):
    model = language.make_language_model(language.GPT)
    prompt = language.make_text(language.GPT, length=4)["tokens"]
    generate.generate(model, prompt, max_new_tokens=2)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        generate.generate(
            language.make_language_model(language.GPT), prompt, max_new_tokens=2
        )
    compiled = [r.getMessage() for r in caplog.records if "_generate" in r.getMessage()]
    assert not [text for text in compiled if text.startswith("Compiling")]


LIKELIHOODS = np.array([0.4, 0.3, 0.2, 0.1])


@pytest.mark.parametrize(
    ("trim", "expected"),
    [
        pytest.param({}, LIKELIHOODS, id="all"),
        pytest.param({"top_k": 2}, [4 / 7, 3 / 7, 0, 0], id="two-most-likely"),
        pytest.param({"top_p": 0.6}, [4 / 7, 3 / 7, 0, 0], id="six-tenths"),
        pytest.param({"top_p": 0.3}, [1, 0, 0, 0], id="at-least-one"),
        pytest.param(
            {"temperature": 0.5},
            LIKELIHOODS**2 / np.sum(LIKELIHOODS**2),
            id="colder",
        ),
    ],
)
def test_draws_follow_the_trimmed_likelihoods(trim, expected):
    num_rows = 4000
    logits = jnp.broadcast_to(jnp.log(jnp.array(LIKELIHOODS))[None], (num_rows, 4))
    settings = {"temperature": 1.0} | trim
    drawn = sample_tokens(logits, jax.random.key(0), **settings)
    found = np.bincount(drawn, minlength=4) / num_rows
    np.testing.assert_allclose(found, expected, atol=0.03)
    assert not found[np.asarray(expected) == 0].any()


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
            "temperature=nan is not finite; use 0 for the most likely token, or above "
            "0",
        ),
        (
            {"temperature": -1.0},
            "temperature=-1.0 is negative; use 0 for the most likely token, or above 0",
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
    settings = generate.make_settings(max_new_tokens=1)
    with pytest.raises((ConfigError, DataError)) as error:
        generate.check(language.GPT, tokens, lengths, settings, None)
    assert str(error.value) == message


def test_padding_may_be_any_integer_and_traced_prompts_are_not_read():
    settings = generate.make_settings(max_new_tokens=1)
    tokens, lengths = jnp.array([[-1, 99, 3]]), jnp.array([1])
    generate.check(language.GPT, tokens, lengths, settings, None)

    def check(tokens, lengths):
        generate.check(language.GPT, tokens, lengths, settings, None)
        return tokens

    assert jax.eval_shape(check, tokens, lengths).shape == (1, 3)


def test_rotary_models_write_no_more_than_their_length():
    settings = generate.make_settings(max_new_tokens=14)
    tokens = np.zeros((1, 3), np.int32)
    with pytest.raises(ConfigError) as error:
        generate.check(language.LLAMA, tokens, None, settings, None)
    assert str(error.value) == (
        "max_new_tokens=14 leaves model.max_length=16 after 3; "
        "ask for 13 or fewer, or shorten the prompt"
    )


def test_lengths_that_are_no_integers_are_refused():
    settings = generate.make_settings(max_new_tokens=1)
    tokens, lengths = np.zeros((1, 3), np.int32), np.array([2.0])
    with pytest.raises(ConfigError) as error:
        generate.check(language.GPT, tokens, lengths, settings, None)
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
    settings = generate.make_settings(max_new_tokens=free)
    generate.check(config, tokens, None, settings, None)
    settings = generate.make_settings(max_new_tokens=free + 1)
    with pytest.raises(ConfigError) as error:
        generate.check(config, tokens, None, settings, None)
    assert str(error.value) == (
        f"max_new_tokens={free + 1} leaves model.{name}={longest} after 3; "
        f"ask for {free} or fewer, or shorten the prompt"
    )


@MODELS
def test_text_is_the_same_where_numbers_are_wide_by_default(config):
    """Fails if a number of a column is an int64 beside int32."""
    model = language.make_language_model(config)
    prompt = language.make_text(config, length=3)["tokens"]
    settings = {"max_new_tokens": NUM_NEW, "temperature": 0.8, "top_k": 5}

    def text():
        key = jax.random.key(0)
        return generate.generate(model, prompt, key=key, **settings).tolist()

    narrow = text()
    with jax.enable_x64(True):
        assert text() == narrow
