import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.reference import transformer as reference
from tests.support import language
from zjax.models.stack import Encoder

BERT_BASE = dataclasses.replace(
    language.BERT,
    num_layers=12,
    embed_size=768,
    mlp_size=3072,
    num_heads=12,
    num_kv_heads=12,
    vocab_size=30_522,
    max_length=512,
    num_token_types=2,
)


@pytest.mark.parametrize(
    ("use_pooling", "expected"), [(False, 109_514_298), (True, 110_104_890)]
)
def test_number_of_parameters_is_that_of_bert_base(use_pooling, expected):
    """With pooling it is the pre-training BERT less its classifier of pairs."""

    def make():
        return Encoder(BERT_BASE, use_pooling=use_pooling, rngs=nnx.Rngs(0))

    leaves = jax.tree.leaves(nnx.state(nnx.eval_shape(make), nnx.Param))
    assert sum(math.prod(leaf.shape) for leaf in leaves) == expected


def test_logits_equal_the_reference():
    model = language.make_language_model(language.BERT)
    tokens = language.make_text(language.BERT)["tokens"]
    lengths = jnp.array([5, 8], jnp.int32)
    found = language.logits_of(model, {"tokens": tokens, "lengths": lengths})
    params = jax.tree.map(np.asarray, language.params_of(model))
    expected = reference.encode(
        params, language.BERT, np.asarray(tokens), np.asarray(lengths)
    )
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(
            found[row, :length], expected[row, :length], rtol=1e-4, atol=1e-4
        )


def test_lengths_and_segments_say_the_same_of_one_document():
    model, batch = (
        language.make_language_model(language.BERT),
        language.make_text(language.BERT, rows=1),
    )
    del batch["weights"]
    by_length = language.loss_of(model, batch | {"lengths": jnp.array([6], jnp.int32)})
    segment_ids = jnp.array([[1, 1, 1, 1, 1, 1, 0, 0]], jnp.int32)
    by_segment = language.loss_of(model, batch | {"segment_ids": segment_ids})
    assert float(by_length.weight_sum) == float(by_segment.weight_sum) == 6
    np.testing.assert_allclose(by_length.loss_sum, by_segment.loss_sum, rtol=1e-5)


def test_masked_tokens_alone_are_learned():
    model = language.make_language_model(language.BERT)
    batch = language.make_text(language.BERT)
    batch["weights"] = jnp.zeros_like(batch["weights"]).at[0, 3].set(1.0)
    logits = np.float64(language.logits_of(model, batch))[0, 3]
    expected = np.log(np.exp(logits).sum()) - logits[batch["targets"][0, 3]]
    found = language.loss_of(model, batch)
    np.testing.assert_allclose(found.loss_sum, expected, rtol=1e-5)


def test_token_types_and_pooling_reach_the_output():
    config = dataclasses.replace(language.BERT, num_token_types=2)
    model = language.make_language_model(config, use_pooling=True)
    batch = language.make_text(config)
    pool = jax.jit(model.pool)
    pooled = pool(batch)
    types = jnp.zeros_like(batch["tokens"])
    np.testing.assert_array_equal(pool(batch | {"token_types": types}), pooled)
    other = pool(batch | {"token_types": types + 1})
    assert pooled.shape == (language.ROWS, language.BERT.embed_size)
    assert not np.allclose(pooled, other)
