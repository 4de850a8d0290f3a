import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.reference import transformer as reference
from tests.support import language
from zjax.errors import ConfigError
from zjax.models.stack import Decoder, hidden_states
from zjax.settings import schema

SHAPES = pytest.mark.parametrize(
    "config",
    [language.GPT, language.LLAMA, language.QWEN3],
    ids=["gpt", "llama", "qwen3"],
)
LLAMA = {
    "norm": "rms_norm",
    "positions": schema.Rotary(),
    "activation": "swiglu",
    "use_bias": False,
    "vocab_size": 128_256,
    "num_heads": 32,
    "num_kv_heads": 8,
}
PUBLISHED = {
    "gpt2_124m": (schema.Model(), 124_439_808),
    "gpt2_1p5b": (
        schema.Model(
            num_layers=48,
            embed_size=1600,
            mlp_size=6400,
            num_heads=25,
            num_kv_heads=25,
            layers_per_scan=4,
        ),
        1_557_611_200,
    ),
    "llama_3_8b": (
        schema.Model(
            num_layers=32, embed_size=4096, mlp_size=14_336, tied_head=False, **LLAMA
        ),
        8_030_261_248,
    ),
    "llama_3p2_1b": (
        schema.Model(num_layers=16, embed_size=2048, mlp_size=8192, **LLAMA),
        1_235_814_400,
    ),
}


@pytest.mark.parametrize(("config", "expected"), PUBLISHED.values(), ids=PUBLISHED)
def test_number_of_parameters_is_the_published_one(config, expected):
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert sum(math.prod(leaf.shape) for leaf in leaves) == expected


@SHAPES
def test_logits_equal_the_reference(config):
    model = language.make_language_model(config)
    batch = language.make_text(config)
    params = jax.tree.map(np.asarray, language.params_of(model))
    expected = reference.decode(params, config, np.asarray(batch["tokens"]))
    found = language.logits_of(model, batch)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_loss_is_the_cross_entropy_of_the_logits():
    model = language.make_language_model(language.GPT)
    batch = language.make_text(language.GPT)
    logits = np.float64(language.logits_of(model, batch))
    targets, weights = np.asarray(batch["targets"]), np.asarray(batch["weights"])
    target_logits = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    losses = np.log(np.exp(logits).sum(-1)) - target_logits
    found = language.loss_of(model, batch)
    np.testing.assert_allclose(found.loss_sum, np.sum(losses * weights), rtol=1e-5)
    np.testing.assert_allclose(found.weight_sum, weights.sum())


def test_packed_documents_give_the_losses_of_separate_ones():
    """Fails if documents see each other, or positions run on from one to the next."""
    model = language.make_language_model(language.GPT)
    batch = language.make_text(language.GPT, rows=1)
    segment_ids = jnp.array([[1, 1, 1, 2, 2, 2, 2, 0]], jnp.int32)
    packed = {"tokens": batch["tokens"], "targets": batch["targets"]}
    found = language.loss_of(model, packed | {"segment_ids": segment_ids})

    def alone(first, last):
        document = jax.tree.map(lambda x: x[:, first:last], packed)
        return float(language.loss_of(model, document).loss_sum)

    assert float(found.weight_sum) == 7
    np.testing.assert_allclose(found.loss_sum, alone(0, 3) + alone(3, 7), rtol=1e-5)


def test_bfloat16_weights_compute_in_bfloat16_and_lose_in_float32():
    model = language.make_language_model(language.GPT)
    graph, state = nnx.split(model)
    narrow = nnx.merge(graph, jax.tree.map(jnp.bfloat16, state))
    batch = language.make_text(language.GPT)

    def hidden(batch):
        return hidden_states(narrow, batch, None)

    assert jax.eval_shape(hidden, batch).dtype == jnp.bfloat16
    assert jax.eval_shape(narrow, batch["tokens"]).dtype == jnp.float32
    found, expected = (language.loss_of(m, batch).loss_sum for m in (narrow, model))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=0.05)


@pytest.mark.parametrize(
    "rates",
    [
        {"dropout_rate": 0.5},
        {"dropout_rate": 0.5, "embedding_dropout_rate": 0.0},
        {"embedding_dropout_rate": 0.5},
        {"attention_dropout_rate": 0.5},
    ],
    ids=["both", "outputs", "embedding", "attention"],
)
def test_dropout_acts_in_training_alone(rates):
    config = dataclasses.replace(language.GPT, **rates)
    model, batch = language.make_language_model(config), language.make_text(config)
    plain = language.loss_of(language.make_language_model(language.GPT), batch)
    keys = [None, *map(jax.random.key, (0, 1, 1))]
    losses = [float(language.loss_of(model, batch, key).loss_sum) for key in keys]
    assert losses[0] == float(plain.loss_sum)
    assert losses[2] == losses[3]
    assert len(set(losses)) == 3


def test_dropouts_of_embedding_outputs_and_attention_are_apart():
    """Fails if a rate acts elsewhere, too."""
    batch, key = language.make_text(language.GPT), jax.random.key(1)

    def loss(**rates):
        config = dataclasses.replace(language.GPT, **rates)
        model = language.make_language_model(config)
        return float(language.loss_of(model, batch, key).loss_sum)

    names = "dropout_rate", "embedding_dropout_rate", "attention_dropout_rate"
    off = dict.fromkeys(names, 0.0)
    found = [loss(**off | {name: 0.5}) for name in names]
    assert len({loss(**off), *found}) == 4
    assert loss(dropout_rate=0.5) == loss(dropout_rate=0.5, embedding_dropout_rate=0.5)


@SHAPES
def test_every_dim_of_a_parameter_is_named(config):
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    names = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        logical = variable.get_metadata("logical")
        assert len(logical) == len(variable.shape)
        names["/".join(map(str, path))] = logical
    assert names["blocks/attention/query/kernel"] == (
        "layers",
        "embed",
        "heads",
        "head_dim",
    )
    assert names["blocks/attention/key/kernel"][2] == "kv_heads"
    assert names["blocks/mlp/down/kernel"] == ("layers", "mlp", "embed")
    assert names["embedding/tokens"] == ("vocab", "embed")


def test_initial_deviations_are_those_of_gpt2():
    config = dataclasses.replace(language.GPT, embed_size=64, mlp_size=256)

    @jax.jit
    def init():
        return language.params_of(Decoder(config, rngs=nnx.Rngs(0)))

    params = init()
    attention = params["blocks"]["attention"]
    np.testing.assert_allclose(np.std(attention["query"]["kernel"]), 0.02, rtol=0.05)
    np.testing.assert_allclose(np.std(attention["out"]["kernel"]), 0.01, rtol=0.05)
    down = params["blocks"]["mlp"]["down"]["kernel"]
    np.testing.assert_allclose(np.std(down), 0.01, rtol=0.05)


def test_too_long_a_sequence_is_refused():
    model = language.make_language_model(language.GPT)
    with pytest.raises(ConfigError) as error:
        model(jnp.zeros((1, 17), jnp.int32))
    assert str(error.value) == (
        "data.length=17 is longer than model.max_length=16; "
        "shorten the sequences or raise model.max_length"
    )
